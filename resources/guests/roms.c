/* Expansion ROMs and BARs of virtual functions where the guest finds them. A ROM must answer at its place when its own
 * enable bit and memory decode are set, and not otherwise. Prints `rom PLACE base=B size=S` and, for each VF BAR,
 * `vf-bar PLACE N base=B size=S vfs=V`, S being that of all virtual functions together. */
#include "pci.h"
#include "runtime.h"

enum { ROM = 0x30, ROM_ON = 1, SRIOV = 0x10 };

static u32 signature(u64 base) { return read32(reach(base, 4)) & 0xffff; }

static void try_rom(struct function *function) {
    place at = function->at;
    u32 held = config_read(at, ROM, 4), command = config_read(at, COMMAND, 2);
    config_write(at, ROM, 4, 0xfffff800);
    u32 mask = config_read(at, ROM, 4) & 0xfffff800;
    config_write(at, ROM, 4, held);
    if (!mask)
        return;
    u64 base = held & mask, size = (u64)~mask + 1;
    require(base && !(held & ROM_ON), "the ROM of %s starts as %x", place_name(at), held);
    require(signature(base) == 0xffff, "the ROM of %s answers while it is off", place_name(at));
    config_write(at, ROM, 4, held | ROM_ON);
    config_write(at, COMMAND, 2, command & ~(u32)DECODE_MEMORY);
    require(signature(base) == 0xffff, "the ROM of %s answers without memory decode", place_name(at));
    config_write(at, COMMAND, 2, command | DECODE_MEMORY);
    require(signature(base) == 0xaa55, "the ROM of %s reads %x", place_name(at), signature(base));
    u32 data = read32(reach(base + 0x18, 4)) & 0xffff;
    require(read32(reach(base + data, 4)) == 0x52494350, "the ROM of %s has no PCI data structure", place_name(at));
    require(read32(reach(base + data + 4, 4)) == function->id, "the ROM of %s is another device's", place_name(at));
    write32(reach(base, 4), 0);
    require(signature(base) == 0xaa55, "the ROM of %s can be written", place_name(at));
    config_write(at, ROM, 4, held);
    require(signature(base) == 0xffff, "the ROM of %s answers after it was switched off", place_name(at));
    say("rom %s base=%lx size=%lx\n", place_name(at), base, size);
}

static void show_virtual_functions(place at) {
    u32 start = find_extended_capability(at, SRIOV);
    if (!start)
        return;
    u32 total = config_read(at, start + 0xe, 2);
    for (u32 n = 0; n < 6; n++) {
        u32 offset = start + 0x24 + 4 * n, low = config_read(at, offset, 4);
        bool wide = (low & 6) == 4;
        u32 high = wide ? config_read(at, offset + 4, 4) : 0;
        config_write(at, offset, 4, 0xffffffff);
        u64 mask = config_read(at, offset, 4) & ~0xfu;
        config_write(at, offset, 4, low);
        if (wide) {
            config_write(at, offset + 4, 4, 0xffffffff);
            mask |= (u64)config_read(at, offset + 4, 4) << 32;
            config_write(at, offset + 4, 4, high);
        } else if (mask)
            mask |= 0xffffffff00000000;
        if (mask)
            say("vf-bar %s %u base=%lx size=%lx vfs=%u\n", place_name(at), n, (u64)high << 32 | (low & ~0xfu), (~mask + 1) * total, total);
        n += wide;
    }
}

void guest(void) {
    pci_start();
    walk();
    for (u32 i = 0; i < function_count; i++) {
        if (functions[i].is_bridge)
            continue;
        try_rom(&functions[i]);
        show_virtual_functions(functions[i].at);
    }
}
