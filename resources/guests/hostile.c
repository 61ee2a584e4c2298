/* Random reads and writes of 1, 2, 4 and 8 bytes, aligned or not, all over configuration space, BARs and ports.
 * `seed=N` (default 1), `rounds=N` (default 2000), `cpus=N` (default 1) processors at once. It passes if it is still alive;
 * the machine must be too.
 * To stay alive it avoids the ports that end or reset the machine, and never sets a bus master bit: a device could
 * then write over this program. With `masters=1` it sets them and may end in any way. */
#include "pci.h"
#include "runtime.h"

static u64 seed, rounds, masters;
static volatile u32 started, finished;

/* xorshift64* (Vigna, 2016); each processor has a state of its own. */
static u64 next(u64 *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1d;
}

#define below(limit) (next(state) % (limit))

/* Processors share the page tables. */
static u64 reach_alone(u64 address, u64 size) {
    static u32 taken;
    while (__atomic_exchange_n(&taken, 1, __ATOMIC_ACQUIRE))
        __builtin_ia32_pause();
    reach(address, size);
    __atomic_store_n(&taken, 0, __ATOMIC_RELEASE);
    return address;
}

/* A value like those drivers write, or any. */
static u64 value(u64 *state) {
    switch (below(8)) {
    case 0:
        return 0;
    case 1:
        return ~0ull;
    case 2:
        return 1ull << below(64);
    case 3: /* an address that something answers, perhaps */
        return function_count ? functions[below(function_count)].bars[below(6)].base | below(16) : 0;
    case 4: /* an address in RAM: a BAR may be put there */
        return below(64) << 20;
    default:
        return next(state);
    }
}

/* Clears the bus master bit of every byte that would land on it. */
static u64 tame(u64 offset, u32 size, u64 written) {
    if (masters)
        return written;
    for (u32 i = 0; i < size; i++)
        if (((offset + i) & 0xfff) == COMMAND)
            written &= ~((u64)BUS_MASTER << 8 * i);
    return written;
}

static void access_memory(u64 at, u32 size, bool is_write, u64 written) {
    if (is_write) {
        if (size == 1)
            write8(at, (u8)written);
        else if (size == 2)
            write16(at, (u16)written);
        else if (size == 4)
            write32(at, (u32)written);
        else
            write64(at, written);
    } else {
        (void)(size == 1 ? read8(at) : size == 2 ? read16(at) : size == 4 ? read32(at) : read64(at));
    }
}

static void access_port(u16 port, u32 size, bool is_write, u64 written) {
    if (is_write) {
        if (size == 1)
            out8(port, (u8)written);
        else if (size == 2)
            out16(port, (u16)written);
        else
            out32(port, (u32)written);
    } else {
        (void)(size == 1 ? in8(port) : size == 2 ? in16(port) : in32(port));
    }
}

/* An offset within a page of a quarter of the BAR, since page tables are finite; unaligned at times. */
static u64 offset_in(u64 *state, u64 size) {
    u64 offset = size < 16384 ? below(size) : size / 4 * below(4) + below(4096);
    return below(4) ? offset & ~3ull : offset;
}

static void hit_ecam(u64 *state, u32 size, bool is_write) {
    struct segment *segment = &segments[below(segment_count)];
    if (!segment->ecam)
        return;
    u64 offset;
    if (function_count && below(8)) {
        place at = functions[below(function_count)].at;
        offset = (u64)(at & 0xffff) << 12 | (below(2) ? below(0x40) : below(0x1000));
    } else {
        offset = ((u64)segment->first_bus << 20) + below((u64)(segment->last_bus - segment->first_bus + 1) << 20);
    }
    if (below(4))
        offset &= ~(u64)(size - 1);
    access_memory(reach_alone(segment->ecam + offset, 16), size, is_write, tame(offset, size, value(state)));
}

static void hit_config_ports(u64 *state, u32 size, bool is_write) {
    u32 address = (u32)value(state);
    if (function_count && below(4))
        address = 0x80000000 | (functions[below(function_count)].at & 0xffff) << 8 | (u32)below(256);
    out32(0xcf8, address);
    u32 lane = (u32)below(4);
    size = size == 8 ? 4 : size;
    access_port((u16)(0xcfc + lane), size, is_write, tame((address & 0xfc) + lane, size, value(state)));
}

static void hit_bar(u64 *state, u32 size, bool is_write) {
    struct function *function = &functions[below(function_count)];
    struct bar *bar = &function->bars[below(6)];
    if (bar->kind < BAR_MEM32 || !bar->base)
        return;
    u64 at = bar->base + offset_in(state, bar->size);
    if (!below(16))
        at = bar->base + bar->size - below(8) - 1; /* straddles the end */
    access_memory(reach_alone(at, 16), size, is_write, value(state));
}

/* True if the access touches a port that ends or resets the machine, or moves the window of configuration ports. */
static bool forbidden(u32 port, u32 size) {
    static const struct { u16 first, last; } ports[] = {{0x64, 0x64}, {0x92, 0x92}, {0xf4, 0xf7}, {0x600, 0x607}, {0xcf8, 0xcff}};
    for (u32 i = 0; i < sizeof ports / sizeof *ports; i++)
        if (port <= ports[i].last && port + size > ports[i].first)
            return true;
    return false;
}

static void hit_port(u64 *state, u32 size, bool is_write) {
    u32 port = (u32)(below(2) ? below(0x10000) : below(0x400));
    size = size == 8 ? 4 : size;
    if (!forbidden(port, size) && port + size <= 0x10000)
        access_port((u16)port, size, is_write, value(state));
}

/* Between and beyond the BARs: the holes of the address space. Above 4 GiB at a few places, for want of page tables. */
static void hit_hole(u64 *state, u32 size, bool is_write) {
    static u64 high[16];
    u64 *place = &high[below(16)];
    if (!*place)
        *place = (1ull << 32) + (below((1ull << physical_address_bits()) - (2ull << 32)) & ~0xfffull);
    u64 at = below(2) ? 0x80000000 + below(0x60000000 - 16) : *place + below(4096);
    for (u32 i = 0; i < memory_range_count; i++)
        if (at + size > memory_ranges[i].start && at < memory_ranges[i].end)
            return;
    access_memory(reach_alone(at, 16), size, is_write, value(state));
}

/* A few string accesses, which reach the hypervisor as one exit with a count. */
static void hit_string(u64 *state) {
    u32 port = (u32)below(0x400);
    static u8 buffer[64];
    u64 count = 1 + below(16);
    void *to = buffer;
    if (forbidden(port, 1))
        return;
    if (below(2))
        __asm__ volatile("rep outsb" : "+S"(to), "+c"(count) : "d"(port) : "memory");
    else
        __asm__ volatile("rep insb" : "+D"(to), "+c"(count) : "d"(port) : "memory");
}

static void go_wild(u64 *state) {
    for (u64 round = 0; round < rounds; round++) {
        u32 size = 1u << below(4);
        bool is_write = below(2);
        switch (below(8)) {
        case 0:
        case 1:
        case 2:
            hit_ecam(state, size, is_write);
            break;
        case 3:
            hit_config_ports(state, size, is_write);
            break;
        case 4:
        case 5:
            if (function_count)
                hit_bar(state, size, is_write);
            break;
        case 6:
            hit_port(state, size, is_write);
            break;
        default:
            if (below(4))
                hit_hole(state, size, is_write);
            else
                hit_string(state);
        }
    }
}

void processor_started(void) {
    load_idt();
    u64 state = (seed + __atomic_add_fetch(&started, 1, __ATOMIC_SEQ_CST)) * 0x9e3779b97f4a7c15 + 1;
    go_wild(&state);
    __atomic_fetch_add(&finished, 1, __ATOMIC_SEQ_CST);
}

void guest(void) {
    u64 cpus = option("cpus", 1);
    seed = option("seed", 1);
    rounds = option("rounds", 2000);
    masters = option("masters", 0);
    u64 state = seed * 0x9e3779b97f4a7c15 + 1;
    pci_start();
    walk();
    say("seed %lu rounds %lu functions %u\n", seed, rounds, function_count);
    if (cpus > 1) {
        start_others(&started, (u32)cpus - 1);
        require(started == cpus - 1, "%u of %lu other processors started", started, cpus - 1);
    }
    go_wild(&state);
    for (u32 i = 0; i < 10000000 && finished < cpus - 1; i++)
        short_pause();
    require(finished == cpus - 1, "%u other processors of %lu came to an end", finished, cpus - 1);
    out8(0x3f8 + 3, 3); /* undo what random writes did to the serial port: divisor latch, loop-back, interrupts */
    out8(0x3f8 + 4, 0);
    out8(0x3f8 + 1, 0);
    say("\nseed %lu survived\n", seed);
}
