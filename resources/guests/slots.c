/* Takes over every hot-plug slot and follows what comes and goes, until a line arrives on the serial port. Prints `came PLACE
 * ID`, `left PLACE` and at the end `came N left N`. What comes is programmed into its port's windows and used: memory decode,
 * bus mastering, MSI-X with its first vector masked and pending, and a long copy over and over on stubs that can.
 * `acknowledge=0`: looks, and never clears an event. `quiet=1`: prints counts only. A letter r on the
 * serial port resets the machine, a letter o lets go of every device whose slot has a power indicator: `let go of PLACE`.
 * `fail=1`: brings nothing up in such slots, and says so by the indicators. `wait=wire` or `wait=message`: looks at slots after an interrupt of a port only, by INTx or
 * by MSI. `errors=1`: takes over error reporting, prints `error SOURCE UNCORRECTABLE CORRECTABLE` for
 * what a root port collects. `bus=N`: follows the registers that ACPI has for bus N, the first with such registers, as a driver
 * of it would; `eject=0`: keeps what it is asked to let go of. `places=N`: follows what the first N of these registers ask for,
 * whatever the bits stand for: `asked for place REGISTER.BIT`, `let go of place REGISTER.BIT`. */
#include "device.h"
#include "ioapic.h"
#include "pci.h"
#include "runtime.h"

enum { SLOT_CAPABILITIES = 0x14, SLOT_CONTROL = 0x18, SLOT_STATUS = 0x1a, HOT_PLUG = 1 << 6 };
enum { PRESENCE_CHANGED = 1 << 3, PRESENT = 1 << 6, LINK_CHANGED = 1 << 8 };
enum { INTERRUPTS = 1 << 3 | 1 << 5 | 1 << 12, INDICATOR_ON = 1 << 8, INDICATOR_BLINK = 2 << 8, INDICATOR_OFF = 3 << 8, INDICATOR = 3 << 8 };

static struct slot {
    struct function *port;
    u32 express;
    bool occupied, orderly;
    struct function device; /* its function 0 */
} slots[256];
static u32 slot_count, came, left;
static bool quiet, acknowledge, fails;
static u32 looks; /* that found nothing to do */

enum { FIRST_GSI = 16, GSIS = 8, WIRE_VECTOR = 0x50, MESSAGE_VECTOR = 0x48 };
static volatile bool rung;
static bool by_wire;

/* A wire stays up until the port's events are cleared, so it is masked until that has happened. */
static void hear(u32 vector) {
    if (vector >= WIRE_VECTOR && vector < WIRE_VECTOR + GSIS)
        ioapic_mask(FIRST_GSI + vector - WIRE_VECTOR);
    rung = true;
}

static void listen_to_wires(void) {
    for (u32 i = 0; i < GSIS; i++)
        ioapic_route(FIRST_GSI + i, (u8)(WIRE_VECTOR + i), true);
}

enum { AER = 1, CORRECTABLE_STATUS = 0x10, ROOT_COMMAND = 0x2c, ROOT_STATUS = 0x30, ERROR_SOURCE = 0x34 };
enum { DEVICE_CONTROL = 8, BRIDGE_CONTROL = 0x3e, SERR_FORWARD = 2, EXPRESS_ROOT = 4 };

static void report_errors(void) {
    for (u32 i = 0; i < function_count; i++) {
        place at = functions[i].at;
        u32 express = find_capability(at, CAP_EXPRESS), aer = find_extended_capability(at, AER);
        if (!express)
            continue;
        config_write(at, express + DEVICE_CONTROL, 2, config_read(at, express + DEVICE_CONTROL, 2) | 0xf);
        if (functions[i].is_bridge)
            config_write(at, BRIDGE_CONTROL, 2, config_read(at, BRIDGE_CONTROL, 2) | SERR_FORWARD);
        if (aer && functions[i].express_type == EXPRESS_ROOT)
            config_write(at, aer + ROOT_COMMAND, 4, 7);
    }
}

/* Status of the function that a root port's source register names. */
static void show_error(place root, u32 source) {
    place at = root >> 16 << 16 | source;
    u32 aer = find_extended_capability(at, AER);
    u32 fatal = config_read(at, aer + 4, 4), correctable = config_read(at, aer + CORRECTABLE_STATUS, 4);
    say("error %s %08x %08x\n", place_name(at), fatal, correctable);
    config_write(at, aer + 4, 4, fatal);
    config_write(at, aer + CORRECTABLE_STATUS, 4, correctable);
}

static void look_for_errors(void) {
    for (u32 i = 0; i < function_count; i++) {
        place at = functions[i].at;
        u32 aer = functions[i].express_type == EXPRESS_ROOT ? find_extended_capability(at, AER) : 0;
        u32 status = aer ? config_read(at, aer + ROOT_STATUS, 4) : 0, source = aer ? config_read(at, aer + ERROR_SOURCE, 4) : 0;
        if (!(status & 0x7f))
            continue;
        config_write(at, aer + ROOT_STATUS, 4, status);
        if (status & 1)
            show_error(at, source & 0xffff);
        if (status & 4)
            show_error(at, source >> 16);
    }
}

static u64 take(struct window *window, u64 size) {
    u64 at = (window->base + size - 1) & ~(size - 1);
    if (window->base > window->limit || at + size - 1 > window->limit || at < window->base)
        return 0;
    window->base = at + size;
    return at;
}

static void give_addresses(struct function *device, struct window *memory, struct window *prefetchable) {
    for (u32 n = 0; n < 6; n++) {
        struct bar bar = device->bars[n] = read_bar(device->at, n);
        bool wide = bar.kind == BAR_MEM64;
        if (bar.kind < BAR_MEM32)
            continue;
        u64 size = bar.size < 4096 ? 4096 : bar.size, at = wide && bar.prefetchable ? take(prefetchable, size) : 0;
        if (!at)
            at = take(memory, size);
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
    looks = 0;
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
        if (fails && slot->orderly) {
            indicate(slot, INDICATOR_BLINK);
            indicate(slot, INDICATOR_OFF);
            say("failed %s\n", place_name(below));
            came++;
            return;
        }
        struct window memory = slot->port->memory, prefetchable = slot->port->prefetchable;
        u32 last = config_read(below, 0x0c, 4) >> 23 & 1 ? 7 : 0;
        for (u32 n = 0; n <= last; n++) {
            struct function function = {.at = below + n, .id = config_read(below + n, 0, 4)};
            if (function.id == 0xffffffff)
                continue;
            give_addresses(&function, &memory, &prefetchable);
            if (!n)
                slot->device = function;
            if (!quiet)
                say("came %s %04x:%04x\n", place_name(below + n), function.id & 0xffff, function.id >> 16);
        }
        indicate(slot, INDICATOR_ON);
        came++;
    }
    if (slot->occupied)
        use(&slot->device);
}

static void let_go(struct slot *slot) {
    if (!slot->occupied || !slot->orderly)
        return;
    indicate(slot, INDICATOR_OFF);
    say("let go of %s\n", place_name(place_of(slot->port->at >> 16, slot->port->secondary, 0, 0)));
}

/* Registers of a bus whose devices come and go by ACPI: which came, which are to leave, which are let go of. */
enum { CAME = 0x640, LEAVES = 0x644, LET_GO = 0x648 };

/* `bus` is segment << 8 | bus number. */
static void look_at_bus(u32 bus, bool eject) {
    struct window memory = {1, 0}, prefetchable = {1, 0};
    for (u32 i = 0; i < function_count; i++)
        if (functions[i].is_bridge && functions[i].at >> 16 == bus >> 8 && functions[i].secondary == (bus & 0xff))
            memory = functions[i].memory, prefetchable = functions[i].prefetchable;
    u32 up = in32(CAME), down = in32(LEAVES);
    for (u32 n = 0; n < 32; n++) {
        place at = place_of(0, bus, n, 0);
        u32 id = config_read(at, 0, 4);
        if (down >> n & 1) {
            say("asked for %s\n", place_name(at));
            looks = 0;
            if (eject) {
                out32(LET_GO, 1u << n);
                say("let go of %s\n", place_name(at));
                left++;
            }
        }
        if (!(up >> n & 1) || id == 0xffffffff)
            continue;
        struct function function = {.at = at, .id = id};
        give_addresses(&function, &memory, &prefetchable);
        say("came %s %04x:%04x pin %u, first 256 bytes %s\n", place_name(at), id & 0xffff, id >> 16, config_read(at, 0x3d, 1),
            config_read(at, 0x100, 4) == 0xffffffff ? "alone" : "and more");
        came++;
        looks = 0;
    }
}

static void look_at_places(u32 registers, bool eject) {
    for (u32 index = 0; index < registers; index++) {
        u32 down = in32((u16)(LEAVES + 12 * index));
        for (u32 n = 0; n < 32; n++) {
            if (!(down >> n & 1))
                continue;
            say("asked for place %u.%u\n", index, n);
            if (eject) {
                out32((u16)(LET_GO + 12 * index), 1u << n);
                say("let go of place %u.%u\n", index, n);
                left++;
            }
        }
    }
}

void guest(void) {
    quiet = option("quiet", 0);
    acknowledge = option("acknowledge", 1);
    fails = option("fail", 0);
    pci_start();
    walk();
    for (u32 i = 0; i < function_count && slot_count < sizeof slots / sizeof *slots; i++) {
        if (functions[i].is_bridge)
            config_write(functions[i].at, COMMAND, 2, config_read(functions[i].at, COMMAND, 2) | DECODE_MEMORY | BUS_MASTER);
        u32 express = functions[i].is_bridge ? find_capability(functions[i].at, CAP_EXPRESS) : 0;
        u32 capabilities = express ? config_read(functions[i].at, express + SLOT_CAPABILITIES, 4) : 0;
        if (!(capabilities & HOT_PLUG))
            continue;
        slots[slot_count++] = (struct slot){.port = &functions[i], .express = express, .orderly = capabilities >> 4 & 1};
        u32 control = config_read(functions[i].at, express + SLOT_CONTROL, 2);
        config_write(functions[i].at, express + SLOT_CONTROL, 2, control | INTERRUPTS);
    }
    bool errors = option("errors", 0);
    if (errors)
        report_errors();
    char wait[8];
    bool polls = !option_text("wait", wait, sizeof wait);
    if (!polls) {
        by_wire = text_equal(wait, "wire");
        interrupt_hook = hear;
        apic_start();
        for (u32 i = 0; i < function_count && !by_wire; i++)
            if (functions[i].is_bridge && msi_vectors(functions[i].at))
                msi_enable(functions[i].at, MESSAGE_VECTOR);
        if (by_wire)
            listen_to_wires();
        interrupts_on();
        rung = true; /* what is there already */
    }
    u32 bus = (u32)option("bus", 0);
    u32 places = (u32)option("places", 0);
    bool eject = option("eject", 1);
    say("slots %u\n", slot_count);
    for (int c = -1; c != '\n'; c = serial_read()) {
        if (c == 'r')
            out8(0xcf9, 0x06);
        for (u32 i = 0; i < slot_count && c == 'o'; i++)
            let_go(&slots[i]);
        if (!polls && !rung)
            continue;
        if (polls)
            rest(&looks);
        rung = false;
        for (u32 i = 0; i < slot_count; i++)
            look(&slots[i]);
        if (errors)
            look_for_errors();
        if (bus)
            look_at_bus(bus, eject);
        look_at_places(places, eject);
        if (by_wire)
            listen_to_wires();
    }
    say("came %u left %u\n", came, left);
    pass();
}
