/* Takes over every hot-plug slot and follows what comes and goes, until a line arrives on the serial port. Prints `came PLACE
 * ID`, `left PLACE` and at the end `came N left N`. What comes is programmed into its port's windows and used: memory decode,
 * bus mastering, MSI-X with its first vector masked and pending, and a long copy over and over on stubs that can.
 * `acknowledge=0`: looks, and never clears an event. `quiet=1`: prints counts only. A letter r on the
 * serial port resets the machine. */
#include "device.h"
#include "pci.h"
#include "runtime.h"

enum { SLOT_CAPABILITIES = 0x14, SLOT_CONTROL = 0x18, SLOT_STATUS = 0x1a, HOT_PLUG = 1 << 6 };
enum { PRESENCE_CHANGED = 1 << 3, PRESENT = 1 << 6, LINK_CHANGED = 1 << 8 };
enum { INTERRUPTS = 1 << 3 | 1 << 5 | 1 << 12, INDICATOR_ON = 1 << 8, INDICATOR_OFF = 3 << 8, INDICATOR = 3 << 8 };

static struct slot {
    struct function *port;
    u32 express;
    bool occupied, orderly;
    struct function device;
} slots[256];
static u32 slot_count, came, left;
static bool quiet, acknowledge;

static u64 take(struct window *window, u64 size) {
    u64 at = (window->base + size - 1) & ~(size - 1);
    if (window->base > window->limit || at + size - 1 > window->limit || at < window->base)
        return 0;
    window->base = at + size;
    return at;
}

static void give_addresses(struct slot *slot) {
    struct function *device = &slot->device;
    struct window memory = slot->port->memory, prefetchable = slot->port->prefetchable;
    for (u32 n = 0; n < 6; n++) {
        struct bar bar = device->bars[n] = read_bar(device->at, n);
        bool wide = bar.kind == BAR_MEM64;
        if (bar.kind < BAR_MEM32)
            continue;
        u64 size = bar.size < 4096 ? 4096 : bar.size, at = wide && bar.prefetchable ? take(&prefetchable, size) : 0;
        if (!at)
            at = take(&memory, size);
        /* None is left for what a device shows that goes at this moment. */
        device->bars[n].base = at;
        if (!at)
            continue;
        config_write(device->at, BAR0 + 4 * n, 4, (u32)at);
        if (wide)
            config_write(device->at, BAR0 + 4 * ++n, 4, (u32)(at >> 32));
    }
    config_write(device->at, COMMAND, 2, DECODE_MEMORY | BUS_MASTER);
}

/* Keeps the engine and a masked vector of a stub busy. It may be gone at any moment, so no result counts. */
static void use(struct function *device) {
    if (!is_stub(device))
        return;
    u64 area = device->bars[0].base;
    u32 messages = find_capability(device->at, CAP_MSIX);
    u32 table = messages ? config_read(device->at, messages + 4, 4) : ~0u;
    if ((table & 7) < 6 && device->bars[table & 7].base) {
        u64 entry = reach(device->bars[table & 7].base + (table & ~7u), 16);
        write32(entry, 0xfee00000);
        write32(entry + 8, 0x30);
        write32(entry + 12, 1);
        msix_control(device->at, MSIX_ON);
        write32(area + STUB_DOORBELL, 0);
    }
    if (read32(area + STUB_CONTROL) & STUB_BUSY)
        return;
    write64(area + STUB_SOURCE, 0x1000000);
    write64(area + STUB_DESTINATION, 0x1800000);
    write32(area + STUB_LENGTH, 1 << 20);
    write32(area + STUB_VECTOR, 0);
    write32(area + STUB_CONTROL, 1);
}

static void indicate(struct slot *slot, u32 power) {
    place at = slot->port->at;
    u32 control = config_read(at, slot->express + SLOT_CONTROL, 2);
    if (slot->orderly && acknowledge)
        config_write(at, slot->express + SLOT_CONTROL, 2, (control & ~(u32)INDICATOR) | power);
}

static void look(struct slot *slot) {
    place at = slot->port->at, below = place_of(at >> 16, slot->port->secondary, 0, 0);
    u32 status = config_read(at, slot->express + SLOT_STATUS, 2), events = status & (PRESENCE_CHANGED | LINK_CHANGED);
    if (events && acknowledge)
        config_write(at, slot->express + SLOT_STATUS, 2, events);
    bool changed = acknowledge && events;
    if (slot->occupied && (changed || !(status & PRESENT))) {
        slot->occupied = false;
        left++;
        indicate(slot, INDICATOR_OFF);
        if (!quiet)
            say("left %s\n", place_name(below));
    }
    if (!slot->occupied && status & PRESENT) {
        u32 id = config_read(below, 0, 4);
        if (id == 0xffffffff)
            return;
        slot->occupied = true;
        slot->device = (struct function){.at = below, .id = id};
        give_addresses(slot);
        indicate(slot, INDICATOR_ON);
        came++;
        if (!quiet)
            say("came %s %04x:%04x\n", place_name(below), id & 0xffff, id >> 16);
    }
    if (slot->occupied)
        use(&slot->device);
}

void guest(void) {
    quiet = option("quiet", 0);
    acknowledge = option("acknowledge", 1);
    pci_start();
    walk();
    for (u32 i = 0; i < function_count && slot_count < sizeof slots / sizeof *slots; i++) {
        u32 express = functions[i].is_bridge ? find_capability(functions[i].at, CAP_EXPRESS) : 0;
        u32 capabilities = express ? config_read(functions[i].at, express + SLOT_CAPABILITIES, 4) : 0;
        if (!(capabilities & HOT_PLUG))
            continue;
        slots[slot_count++] = (struct slot){.port = &functions[i], .express = express, .orderly = capabilities >> 4 & 1};
        u32 control = config_read(functions[i].at, express + SLOT_CONTROL, 2);
        config_write(functions[i].at, express + SLOT_CONTROL, 2, control | INTERRUPTS);
    }
    say("slots %u\n", slot_count);
    for (int c = -1; c != '\n'; c = serial_read()) {
        if (c == 'r')
            out8(0xcf9, 0x06);
        for (u32 i = 0; i < slot_count; i++)
            look(&slots[i]);
    }
    say("came %u left %u\n", came, left);
    pass();
}
