/* BARs of I/O ports: each must answer where it was placed while I/O decode is on, in bytes, words and dwords, and follow
 * when it is moved to its neighbour's place, with `move=1`. Prints `ports PLACE N base=B size=S`. */
#include "pci.h"
#include "runtime.h"

static void set_command(place at, u32 clear, u32 set) {
    config_write(at, COMMAND, 2, (config_read(at, COMMAND, 2) & ~clear) | set);
}

static void try_ports(struct function *function, u32 n) {
    struct bar *bar = &function->bars[n];
    place at = function->at;
    if (bar->kind != BAR_IO || !bar->base)
        return;
    u16 base = (u16)bar->base, last = (u16)(base + bar->size - 4), moved = (u16)(base ^ bar->size);
    out32(last, 0x44332211);
    out8(last, 0x55);
    out16((u16)(last + 2), 0x7766);
    require(in32(last) == 0x77662255, "BAR %u of %s reads %x", n, place_name(at), in32(last));
    require(in8((u16)(last + 1)) == 0x22 && in16((u16)(last + 2)) == 0x7766, "parts of BAR %u of %s", n, place_name(at));
    set_command(at, DECODE_IO, 0);
    require(in32(last) == 0xffffffff, "BAR %u of %s answers without decode", n, place_name(at));
    if (option("move", 0)) {
        config_write(at, BAR0 + 4 * n, 4, moved);
        set_command(at, 0, DECODE_IO);
        require(in32(last) == 0xffffffff, "BAR %u of %s answers where it was", n, place_name(at));
        require(in32((u16)(moved + bar->size - 4)) == 0x77662255, "BAR %u of %s did not move", n, place_name(at));
        set_command(at, DECODE_IO, 0);
        config_write(at, BAR0 + 4 * n, 4, base);
    }
    set_command(at, 0, DECODE_IO);
    require(in32(last) == 0x77662255, "BAR %u of %s did not come back", n, place_name(at));
    say("ports %s %u base=%lx size=%lx\n", place_name(at), n, bar->base, bar->size);
}

void guest(void) {
    pci_start();
    walk();
    for (u32 i = 0; i < function_count; i++)
        for (u32 n = 0; n < 6 && !functions[i].is_bridge; n++)
            try_ports(&functions[i], n);
}
