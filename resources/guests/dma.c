/* The copy engine of every stub: to and from RAM, within and between BARs, unaligned, of one byte and of 1 MiB; and what must
 * be refused: bus mastering off here or at a bridge above, addresses that nobody answers, a peer with decode off, bad lengths.
 * Prints `copied PLACE N times` for each engine. */
#include "device.h"
#include "runtime.h"

enum { LONGEST = 1 << 20, VIRTIO_VENDOR = 0x1af4 }; /* virtio BARs are registers, not memory to copy into */

static __attribute__((section(".scratch,\"aw\",@nobits#"), aligned(4096))) u8 from[LONGEST], to[LONGEST];
static u32 copies;

static void fill(u64 at, u32 bytes, u32 seed) {
    for (u32 i = 0; i < bytes; i++)
        write8(at + i, (u8)(seed + i * 7));
}

static void expect_copy(struct function *engine, u64 source, u64 target, u32 bytes, u32 checked) {
    fill(source, checked, ++copies * 31);
    fill(source + bytes - checked, checked, copies * 31 + 5);
    u32 before = read32(stub_address(engine, STUB_DMA_COUNT));
    u32 control = stub_copy(engine, source, target, bytes, 0);
    require(control == STUB_DONE, "%s: copy of %u bytes from %lx to %lx ends with control %x", place_name(engine->at), bytes,
            source, target, control);
    require(bytes_equal((void *)source, (void *)target, checked), "%s: wrong bytes at %lx", place_name(engine->at), target);
    require(bytes_equal((void *)(source + bytes - checked), (void *)(target + bytes - checked), checked),
            "%s: wrong bytes at the end of %lx", place_name(engine->at), target);
    require(read32(stub_address(engine, STUB_DMA_COUNT)) == before + 1, "%s: the copy is not counted", place_name(engine->at));
}

static void expect_refusal(struct function *engine, u64 source, u64 target, u32 bytes, const char *why) {
    u32 before = read32(stub_address(engine, STUB_DMA_COUNT));
    u32 control = stub_copy(engine, source, target, bytes, 0);
    require(control & STUB_ERROR && !(control & (STUB_BUSY | STUB_DONE)), "%s: copy ends with control %x although %s",
            place_name(engine->at), control, why);
    require(read32(stub_address(engine, STUB_DMA_COUNT)) == before, "%s: a refused copy is counted", place_name(engine->at));
}

static u64 area(struct function *function) {
    struct bar *bar = &function->bars[largest_bar(function)];
    return reach(bar->base + bar->size / 2, 4096);
}

static void set_command(place at, u32 clear, u32 set) {
    config_write(at, COMMAND, 2, (config_read(at, COMMAND, 2) & ~clear) | set);
}

/* The engine writes its own registers, the start bit too, and must come to an end. */
static void program_itself(struct function *engine) {
    u64 page = engine->bars[0].base;
    for (u32 i = 0; i < 0x40; i += 4)
        *(u32 *)(from + i) = 0;
    *(u64 *)(from + STUB_SOURCE) = (u64)from;
    *(u64 *)(from + STUB_DESTINATION) = page;
    *(u32 *)(from + STUB_LENGTH) = 0x40;
    *(u32 *)(from + STUB_CONTROL) = 1;
    u32 control = stub_copy(engine, (u64)from, page, 0x40, 0);
    require(!(control & STUB_BUSY), "%s: a copy over its own registers does not end", place_name(engine->at));
    require(read32(page + STUB_MAGIC) == STUB_MAGIC_VALUE, "%s: a copy changed its magic", place_name(engine->at));
}

static void test_engine(struct function *engine) {
    u64 a = (u64)from, b = (u64)to;
    set_command(engine->at, 0, DECODE_MEMORY | BUS_MASTER | INTX_OFF);
    expect_copy(engine, a, b, 64, 64);
    expect_copy(engine, a, b, 1, 1);
    expect_copy(engine, a + 3, b + 4093, 129, 129);
    expect_copy(engine, a, b, LONGEST, 64);
    for (u32 i = 0; i < function_count; i++) {
        struct function *peer = &functions[i];
        if ((peer->id & 0xffff) == VIRTIO_VENDOR || largest_bar(peer) < 0 || peer->header != 0 || !(config_read(peer->at, COMMAND, 2) & DECODE_MEMORY))
            continue;
        expect_copy(engine, a, area(peer) + 0x200, 256, 64);
        expect_copy(engine, area(peer) + 0x200, b, 256, 64);
        if (is_stub(peer) && largest_bar(engine) >= 0)
            expect_copy(engine, area(engine), area(peer) + 0x800, 256, 64);
        if (peer == engine)
            continue;
        set_command(peer->at, DECODE_MEMORY, 0);
        expect_refusal(engine, a, area(peer) + 0x200, 64, "the peer's memory decode is off");
        set_command(peer->at, 0, DECODE_MEMORY);
        expect_copy(engine, a, area(peer) + 0x200, 64, 64);
    }
    expect_refusal(engine, a, 1ull << 46, 64, "nothing is there");
    expect_refusal(engine, 0xfffffffffffff000, b, 64, "no address is that large");
    if (segments[0].ecam) {
        expect_refusal(engine, a, segments[0].ecam, 64, "that is configuration space");
        expect_refusal(engine, segments[0].ecam, b, 64, "that is configuration space");
    }
    expect_refusal(engine, a, 0xfee00000, 64, "those are the local APICs");
    program_itself(engine);
    expect_refusal(engine, a, b, 0, "the length is 0");
    expect_refusal(engine, a, b, LONGEST + 1, "the length is above 1 MiB");
    set_command(engine->at, BUS_MASTER, 0);
    expect_refusal(engine, a, b, 64, "bus mastering is off");
    set_command(engine->at, 0, BUS_MASTER);
    for (int above = engine->parent; above >= 0; above = functions[above].parent) {
        set_command(functions[above].at, BUS_MASTER, 0);
        expect_refusal(engine, a, b, 64, "bus mastering is off in a bridge above");
        set_command(functions[above].at, 0, BUS_MASTER);
    }
    expect_copy(engine, a, b, 64, 64);
    say("copied %s %u times\n", place_name(engine->at), copies);
    copies = 0;
}

void guest(void) {
    pci_start();
    walk();
    for (u32 i = 0; i < function_count; i++)
        if (functions[i].is_bridge)
            set_command(functions[i].at, 0, BUS_MASTER);
    struct function *engine;
    u32 n;
    for (n = 0; (engine = stub(n)); n++)
        test_engine(engine);
    require(n, "no stub with a register page");
}
