/* BARs, decode and bridge windows as a guest may change them: the memory behind a BAR must follow, and nothing may
 * answer at a place it has left. Works on the first stub with a register page, which has to be the only endpoint below
 * its root port; memory beyond that page is checked through its largest BAR if that is another one. Prints one line per
 * step. `toggles=N`: only switches decode of the device and of each bridge above off and on N times, with sizing (case C9). */
#include "device.h"
#include "runtime.h"

static struct function *device;
static place chain[32]; /* the bridges above the device, the nearest first */
static u32 chain_length;

static void set_command(place at, u32 clear, u32 set) {
    config_write(at, COMMAND, 2, (config_read(at, COMMAND, 2) & ~clear) | set);
}

static void write_bar(u32 n, u64 base) {
    config_write(device->at, BAR0 + 4 * n, 4, (u32)base);
    if (device->bars[n].kind == BAR_MEM64)
        config_write(device->at, BAR0 + 4 * n + 4, 4, (u32)(base >> 32));
}

/* Something that BAR n's contents can be recognised by: scratch register or memory in the middle. */
static u64 mark_place(u32 n, u64 base) { return n == 0 ? base + STUB_SCRATCH : base + device->bars[n].size / 2; }

static void put_mark(u32 n, u32 value) { write32(reach(mark_place(n, device->bars[n].base), 4), value); }

static void expect_mark(u32 n, u64 base, u32 value, const char *when) {
    u32 seen = read32(reach(mark_place(n, base), 4));
    require(seen == value, "BAR %u at %lx reads %x, want %x: %s", n, base, seen, value, when);
}

static void expect_nothing(u32 n, u64 base, const char *when) { expect_mark(n, base, 0xffffffff, when); }

/* A hypervisor may leave the memory of a hidden BAR mapped until it moves, for guests that only size it. Registers must
 * not answer. */
static void expect_hidden(u32 n, u64 base, u32 value, const char *when) {
    u32 seen = read32(reach(mark_place(n, base), 4));
    require(seen == 0xffffffff || (n && seen == value), "BAR %u at %lx reads %x: %s", n, base, seen, when);
}

/* Case A1: halves of a 64-bit BAR sized with decode on, in the given order; the BAR must answer at its old place after. */
static void size_with_decode_on(u32 n, bool high_first) {
    u32 offset = BAR0 + 4 * n, halves[2] = {offset + (high_first ? 4 : 0), offset + (high_first ? 0 : 4)};
    u32 old[2] = {config_read(device->at, halves[0], 4), config_read(device->at, halves[1], 4)};
    for (u32 i = 0; i < 2; i++) {
        config_write(device->at, halves[i], 4, 0xffffffff);
        (void)config_read(device->at, halves[i], 4);
        config_write(device->at, halves[i], 4, 0);
    }
    for (u32 i = 0; i < 2; i++)
        config_write(device->at, halves[i], 4, old[i]);
    expect_mark(n, device->bars[n].base, 0x51500000 + n, "sized with decode on and restored");
}

static void set_window(place bridge, bool prefetchable, u64 base, u64 limit) {
    u32 offset = prefetchable ? 0x24 : 0x20;
    if (prefetchable) {
        config_write(bridge, 0x28, 4, (u32)(base >> 32));
        config_write(bridge, 0x2c, 4, (u32)(limit >> 32));
    }
    config_write(bridge, offset, 4, (u32)(base >> 16 & 0xfff0) | (u32)(limit & 0xfff00000));
}

static bool contains(struct window window, struct bar *bar) {
    return window.base <= bar->base && bar->base + bar->size - 1 <= window.limit;
}

/* The window of the nearest bridge that holds BAR n: 64-bit prefetchable ones in the prefetchable window, the others in
 * the memory window (case A2). */
static bool in_prefetchable_window(u32 n) {
    struct function *above = &functions[device->parent];
    bool prefetchable = device->bars[n].kind == BAR_MEM64 && device->bars[n].prefetchable;
    require(contains(prefetchable ? above->prefetchable : above->memory, &device->bars[n]), "BAR %u lies in no window of its kind", n);
    return prefetchable;
}

static void decode_of(u32 n) {
    put_mark(n, 0x51500000 + n);
    set_command(device->at, DECODE_MEMORY, 0);
    expect_hidden(n, device->bars[n].base, 0x51500000 + n, "decode is off");
    set_command(device->at, 0, DECODE_MEMORY);
    expect_mark(n, device->bars[n].base, 0x51500000 + n, "decode is on again");
    for (u32 i = 0; i < chain_length; i++) {
        set_command(chain[i], DECODE_MEMORY, 0);
        expect_hidden(n, device->bars[n].base, 0x51500000 + n, "a bridge's memory decode is off");
        set_command(chain[i], 0, DECODE_MEMORY);
        expect_mark(n, device->bars[n].base, 0x51500000 + n, "the bridge decodes again");
    }
    say("bar %u: decode\n", n);
}

static void close_windows_of(u32 n) {
    bool prefetchable = in_prefetchable_window(n);
    for (u32 i = 0; i < chain_length; i++) {
        u32 offset = prefetchable ? 0x24 : 0x20, old = config_read(chain[i], offset, 4);
        u32 high_base = config_read(chain[i], 0x28, 4), high_limit = config_read(chain[i], 0x2c, 4);
        set_window(chain[i], prefetchable, 0xfff00000, 0);
        expect_hidden(n, device->bars[n].base, 0x51500000 + n, "a window above is closed");
        if (prefetchable) {
            config_write(chain[i], 0x28, 4, high_base);
            config_write(chain[i], 0x2c, 4, high_limit);
        }
        config_write(chain[i], offset, 4, old);
        expect_mark(n, device->bars[n].base, 0x51500000 + n, "the window is open again");
    }
    say("bar %u: windows\n", n);
}

/* Moves BAR n and the windows of all bridges above it to `base`, where they hold nothing else. The other BARs of the same
 * window are cut off meanwhile. */
static void move_windows(bool prefetchable, u64 start, u64 end) {
    for (u32 i = chain_length; i-- > 0;)
        set_window(chain[i], prefetchable, start & ~0xfffffull, (end - 1) | 0xfffff);
}

static void move(u32 n) {
    bool prefetchable = in_prefetchable_window(n);
    struct bar *bar = &device->bars[n];
    struct function *root = device;
    while (root->parent >= 0)
        root = &functions[root->parent];
    struct window old = prefetchable ? root->prefetchable : root->memory;
    u64 step = bar->size < 1 << 20 ? 1 << 20 : bar->size;
    /* The first aligned place above everything that is in use. */
    u64 used = old.limit;
    for (u32 i = 0; i < function_count; i++)
        for (u32 b = 0; b < 6; b++)
            if (functions[i].bars[b].kind >= BAR_MEM32 && (functions[i].bars[b].base >> 32 != 0) == (bar->base >> 32 != 0) &&
                functions[i].bars[b].base + functions[i].bars[b].size > used)
                used = functions[i].bars[b].base + functions[i].bars[b].size;
    u64 target = (used + step) & ~(step - 1);
    if (target + step <= used || (bar->base >> 32 == 0 && target + step > 0xe0000000)) {
        say("bar %u: no room to move\n", n);
        return;
    }

    struct function saved[32];
    for (u32 i = 0, at = (u32)device->parent; i < chain_length; at = (u32)functions[at].parent)
        saved[i++] = functions[at];
    put_mark(n, 0x51510000 + n);
    set_command(device->at, DECODE_MEMORY, 0);
    move_windows(prefetchable, target, target + step);
    write_bar(n, target);
    set_command(device->at, 0, DECODE_MEMORY);
    expect_mark(n, target, 0x51510000 + n, "moved with decode off");
    expect_nothing(n, bar->base, "it has moved away");

    /* Back again with decode on, in the order a careless system would take. */
    write_bar(n, bar->base);
    for (u32 i = chain_length; i-- > 0;) {
        struct window window = prefetchable ? saved[i].prefetchable : saved[i].memory;
        set_window(chain[i], prefetchable, window.base, window.limit);
    }
    expect_mark(n, bar->base, 0x51510000 + n, "moved back with decode on");
    expect_nothing(n, target, "it has moved back");
    put_mark(n, 0x51500000 + n);
    say("bar %u: move to %lx and back\n", n, target);
}

/* Case A1: BAR n is sent where no BAR can be, with decode off and with decode on: its old place goes on working. */
static void refuse(u32 n, u64 target, const char *what) {
    if (target >> 32 && device->bars[n].kind != BAR_MEM64)
        return;
    put_mark(n, 0x51520000 + n);
    for (u32 on = 0; on < 2; on++) {
        if (!on)
            set_command(device->at, DECODE_MEMORY, 0);
        write_bar(n, target);
        set_command(device->at, 0, DECODE_MEMORY);
        expect_mark(n, device->bars[n].base, 0x51520000 + n, what);
        write_bar(n, device->bars[n].base);
        expect_mark(n, device->bars[n].base, 0x51520000 + n, "back from where it could not be");
    }
    say("bar %u: not to %s\n", n, what);
}

static void refuse_all(u32 n) {
    u64 size = device->bars[n].size;
    u32 *code = (u32 *)0x100000, before = *code;
    refuse(n, size > 0x1000000 ? 0x40000000 & ~(size - 1) : 0x1000000, "RAM");
    refuse(n, segments[0].ecam & ~(size - 1), "configuration space");
    refuse(n, 0xfec00000 & ~(size - 1), "the interrupt controller");
    refuse(n, 0xfee00000 & ~(size - 1), "the local interrupt controller");
    refuse(n, 0xff00000000000000, "an address that the processor has not");
    require(*code == before, "RAM has changed");
    for (u32 other = 0; other < 6; other++)
        if (other != n && device->bars[other].kind >= BAR_MEM32 && device->bars[other].size >= size) {
            u64 end = mark_place(other, device->bars[other].base) + 0x1000 + size;
            refuse(n, end < device->bars[other].base + device->bars[other].size ? end & ~(size - 1) : device->bars[other].base,
                   "another BAR");
        }
}

/* Case C9: what the hypervisor does for it is counted there. */
static void toggle(u32 times) {
    for (u32 i = 0; i < times; i++) {
        set_command(device->at, DECODE_MEMORY, 0);
        for (u32 n = 0; n < 6; n++) {
            u32 offset = BAR0 + 4 * n, old = config_read(device->at, offset, 4);
            config_write(device->at, offset, 4, 0xffffffff);
            (void)config_read(device->at, offset, 4);
            config_write(device->at, offset, 4, old);
        }
        set_command(device->at, 0, DECODE_MEMORY);
        place bridge = chain[i % chain_length];
        set_command(bridge, DECODE_MEMORY, 0);
        set_command(bridge, 0, DECODE_MEMORY);
    }
    for (u32 n = 0; n < 6; n++)
        if (device->bars[n].kind >= BAR_MEM32)
            (void)read32(reach(mark_place(n, device->bars[n].base), 4));
    say("toggled %u times\n", times);
}

/* A neighbour may have the same ids, but no two BARs have the same address. */
static bool is_the_device(place at) {
    return config_read(at, 0, 4) == device->id && (config_read(at, BAR0, 4) & ~15u) == (u32)device->bars[0].base;
}

/* Bus numbers that are free, or a neighbour's: the first one inside the range above that no function uses, else that of
 * a neighbouring port with a single bus, which then takes ours. */
static void renumber(void) {
    struct function *above = &functions[device->parent], *neighbour = NULL;
    u32 ours = above->secondary, number = ours + 1;
    u32 limit = above->parent < 0 ? segments[0].last_bus : functions[above->parent].subordinate;
    if (above->subordinate != ours) {
        say("renumber: more than one bus below the port\n");
        return;
    }
    bool spare = number <= limit;
    for (u32 i = 0; i < function_count; i++) {
        struct function *other = &functions[i];
        spare &= bus_of(other->at) != number && (!other->is_bridge || other == above || other->secondary != number);
        if (other != above && other->is_bridge && other->parent == above->parent && other->secondary == other->subordinate &&
            other->at >> 8 == above->at >> 8)
            neighbour = other;
    }
    if (!spare && !neighbour) {
        say("renumber: no spare bus and no neighbour\n");
        return;
    }
    u32 buses = config_read(above->at, BUSES, 4) & 0xff0000ff, neighbour_buses = 0;
    if (!spare) {
        number = neighbour->secondary;
        neighbour_buses = config_read(neighbour->at, BUSES, 4) & 0xff0000ff;
        config_write(neighbour->at, BUSES, 4, neighbour_buses);
        require(config_read(place_of(device->at >> 16, number, 0, 0), 0, 4) == 0xffffffff, "bus %02x answers without a port", number);
    }
    config_write(above->at, BUSES, 4, buses | number << 8 | number << 16);
    if (!spare)
        config_write(neighbour->at, BUSES, 4, neighbour_buses | ours << 8 | ours << 16);
    place moved = place_of(device->at >> 16, number, device_of(device->at), function_of(device->at));
    require(is_the_device(moved), "the device is not on bus %02x after renumbering", number);
    require(!is_the_device(device->at), "the device still answers at %s", place_name(device->at));
    expect_mark(0, device->bars[0].base, 0x51500000, "the bus has another number");
    if (!spare)
        config_write(neighbour->at, BUSES, 4, neighbour_buses | number << 8 | number << 16);
    config_write(above->at, BUSES, 4, buses | ours << 8 | ours << 16);
    require(is_the_device(device->at), "the device is not back at %s", place_name(device->at));
    say("renumber: %02x to %02x and back\n", ours, number);
}

void guest(void) {
    pci_start();
    walk();
    device = stub(0);
    require(device, "no stub with a register page");
    require(device->parent >= 0, "the stub is not below a port");
    for (int above = device->parent; above >= 0 && chain_length < 32; above = functions[above].parent)
        chain[chain_length++] = functions[above].at;
    u32 toggles = (u32)option("toggles", 0);
    if (toggles) {
        toggle(toggles);
        return;
    }
    for (u32 n = 0; n < 6; n++) {
        struct bar *bar = &device->bars[n];
        if (bar->kind < BAR_MEM32 || (n && (int)n != largest_bar(device)))
            continue;
        require(bar->base, "BAR %u is not assigned", n);
        require(!(bar->base & (bar->size - 1)), "BAR %u at %lx is not aligned", n, bar->base);
        decode_of(n);
        close_windows_of(n);
        if (bar->kind == BAR_MEM64) {
            size_with_decode_on(n, false);
            size_with_decode_on(n, true);
            say("bar %u: case A1\n", n);
        }
        refuse_all(n);
        move(n);
    }
    renumber();
}
