/* Interrupts of every stub that has a register page, rung by its doorbell: MSI-X with masks and pending bits, MSI with
 * its vectors, INTx by level through the I/O interrupt controller; then those of its virtual functions. Prints `tested PLACE
 * KIND` for each. */
#include "device.h"
#include "ioapic.h"
#include "runtime.h"

enum { FIRST_INTX_GSI = 16, INTX_GSIS = 8, INTX_VECTOR = 0x50, STATUS = 0x06, INTERRUPT_STATUS = 8 };

static void ring(struct function *function, u32 vector) { write32(stub_address(function, STUB_DOORBELL), vector); }

/* Rings and demands that exactly one interrupt comes. */
static void ring_and_expect(struct function *function, u32 index, u8 vector) {
    u32 before = interrupt_count[vector];
    ring(function, index);
    require(interrupt_arrives(vector, before), "%s: no interrupt for vector %u", place_name(function->at), index);
    require(interrupt_count[vector] == before + 1, "%s: vector %u came twice", place_name(function->at), index);
}

/* Rings and demands that nothing comes. */
static void ring_in_vain(struct function *function, u32 index, u8 vector, const char *why) {
    u32 before = interrupt_count[vector];
    ring(function, index);
    for (u32 i = 0; i < 200; i++)
        short_pause();
    require(interrupt_count[vector] == before, "%s: vector %u came although %s", place_name(function->at), index, why);
}

static void test_msix(struct function *function) {
    place at = function->at;
    u32 count = msix_vectors(at), used = count < 16 ? count : 16;
    for (u32 i = 0; i < used; i++)
        msix_fill(function, i, (u8)(FIRST_VECTOR + i));
    ring_in_vain(function, 0, FIRST_VECTOR, "MSI-X is off");
    msix_control(at, MSIX_ON);
    for (u32 i = 0; i < used; i++)
        ring_and_expect(function, i, (u8)(FIRST_VECTOR + i));
    if (count > used) {
        msix_fill(function, count - 1, FIRST_VECTOR + 17);
        ring_and_expect(function, count - 1, FIRST_VECTOR + 17);
    }

    u64 entry = msix_entry(function, 0);
    write32(entry + 12, 1);
    ring_in_vain(function, 0, FIRST_VECTOR, "it is masked");
    require(msix_pending(function, 0), "%s: no pending bit behind the vector's mask", place_name(at));
    u32 before = interrupt_count[FIRST_VECTOR];
    write32(entry + 12, 0);
    require(interrupt_arrives(FIRST_VECTOR, before), "%s: unmasking delivers nothing", place_name(at));
    require(!msix_pending(function, 0), "%s: the pending bit stays", place_name(at));

    msix_control(at, MSIX_ON | MSIX_MASK_ALL);
    ring_in_vain(function, 0, FIRST_VECTOR, "the function is masked");
    require(msix_pending(function, 0), "%s: no pending bit behind the function's mask", place_name(at));
    before = interrupt_count[FIRST_VECTOR];
    msix_control(at, MSIX_ON);
    require(interrupt_arrives(FIRST_VECTOR, before), "%s: unmasking the function delivers nothing", place_name(at));

    /* A vector that the guest moves goes to the new place at once. */
    write32(entry + 8, FIRST_VECTOR + 18);
    ring_and_expect(function, 0, FIRST_VECTOR + 18);

    u32 command = config_read(at, COMMAND, 2);
    config_write(at, COMMAND, 2, command & ~(u32)BUS_MASTER);
    ring_in_vain(function, 1 % count, (u8)(FIRST_VECTOR + 1 % used), "bus mastering is off");
    config_write(at, COMMAND, 2, command);
    msix_control(at, 0);
    say("tested %s msix %u\n", place_name(at), count);
}

static void test_msi(struct function *function) {
    place at = function->at;
    u32 offset = find_capability(at, CAP_MSI), count = msi_vectors(at);
    u32 control = config_read(at, offset + 2, 2);
    u8 vector = 0x20; /* aligned to 32, so the low bits of the data can carry any vector */
    ring_in_vain(function, 0, vector, "MSI is off");
    msi_enable(at, vector);
    config_write(at, offset + 2, 2, (control & ~0x70u) | (control >> 1 & 7) << 4 | 1);
    for (u32 i = 0; i < count; i++)
        ring_and_expect(function, i, (u8)(vector + i));
    if (control & 0x100) {
        u32 mask = offset + (control & 0x80 ? 0x10 : 0x0c);
        config_write(at, mask, 4, 1);
        ring_in_vain(function, 0, vector, "it is masked");
        require(config_read(at, mask + 4, 4) & 1, "%s: no pending bit behind the mask", place_name(at));
        u32 before = interrupt_count[vector];
        config_write(at, mask, 4, 0);
        require(interrupt_arrives(vector, before), "%s: unmasking delivers nothing", place_name(at));
        require(!(config_read(at, mask + 4, 4) & 1), "%s: the pending bit stays", place_name(at));
    }
    msi_disable(at);
    say("tested %s msi %u%s\n", place_name(at), count, control & 0x100 ? " maskable" : "");
}

/* The GSI of a pin: 16 + (device + pin) % 8 on the root bus, after the swizzle of each bridge on the way
 * (PCI-to-PCI bridge specification 1.2, 9.1; PCIe 6.0, 2.2.8.1). */
static u32 expected_gsi(struct function *function) {
    u32 pin = function->pin - 1u, device = device_of(function->at);
    for (int above = function->parent; above >= 0; above = functions[above].parent) {
        pin = (pin + device) % 4;
        device = device_of(functions[above].at);
    }
    return FIRST_INTX_GSI + (device + pin) % INTX_GSIS;
}

static struct function *asserting;
static volatile u32 last_gsi;

/* INTx stays asserted until the function is told to keep it down. */
static void silence(u32 vector) {
    if (vector < INTX_VECTOR || vector >= INTX_VECTOR + INTX_GSIS)
        return;
    last_gsi = FIRST_INTX_GSI + vector - INTX_VECTOR;
    config_write(asserting->at, COMMAND, 2, config_read(asserting->at, COMMAND, 2) | INTX_OFF);
}

static void test_intx(struct function *function) {
    u32 gsi = expected_gsi(function), vector = INTX_VECTOR + gsi - FIRST_INTX_GSI;
    place at = function->at;
    u32 command = config_read(at, COMMAND, 2) & ~(u32)INTX_OFF;
    asserting = function;
    interrupt_hook = silence;
    config_write(at, COMMAND, 2, command);
    last_gsi = 0;
    ring(function, 0);
    for (u32 i = 0; i < 100000 && !last_gsi; i++)
        short_pause();
    require(last_gsi, "%s: no INTx", place_name(at));
    require(last_gsi == gsi, "%s: INTx came on GSI %u, want %u", place_name(at), last_gsi, gsi);
    require(config_read(at, STATUS, 2) & INTERRUPT_STATUS, "%s: interrupt status is clear", place_name(at));
    /* An interrupt that was on its way may still arrive: some hypervisors complete level interrupts as they deliver them. */
    for (u32 i = 0; i < 200; i++)
        short_pause();
    u32 before = interrupt_count[vector];
    for (u32 i = 0; i < 200; i++)
        short_pause();
    require(interrupt_count[vector] == before, "%s: INTx goes on although it is disabled", place_name(at));
    config_write(at, COMMAND, 2, command);
    require(interrupt_arrives(vector, before), "%s: a pending INTx does not come when enabled", place_name(at));
    say("tested %s intx %c gsi %u\n", place_name(at), 'A' + function->pin - 1, gsi);
    interrupt_hook = NULL;
}

/* Has the port above forward alternative routing-ids, by which functions above 7 are reached (PCIe 6.0, 6.13). */
static void forward_routing_ids(const struct function *function) {
    enum { DEVICE_CONTROL_2 = 0x28, ARI_FORWARDING = 1 << 5 };
    if (function->parent < 0)
        return;
    place port = functions[function->parent].at;
    u32 control = find_capability(port, CAP_EXPRESS) + DEVICE_CONTROL_2;
    config_write(port, control, 2, config_read(port, control, 2) | ARI_FORWARDING);
}

/* Enables the virtual functions of a physical one, all of which have a register page, and tests each. Their BARs lie where its
 * SR-IOV capability says (PCIe 6.0, 9.3.3.14). */
static void test_virtual_functions(const struct function *owner) {
    enum { SRIOV = 0x10, ENABLE = 1, MEMORY = 8 };
    place physical = owner->at;
    u32 start = find_extended_capability(physical, SRIOV);
    if (!start)
        return;
    forward_routing_ids(owner);
    u32 count = config_read(physical, start + 0xe, 2), bar = start + 0x24;
    u32 base = config_read(physical, bar, 4);
    config_write(physical, bar, 4, 0xffffffff);
    u32 size = ~(config_read(physical, bar, 4) & ~0xfu) + 1;
    config_write(physical, bar, 4, base);
    require((base & 7) == 0 && size >= 4096, "%s: VF BAR 0 is no 32-bit memory", place_name(physical));
    config_write(physical, start + 0x10, 2, count);
    config_write(physical, start + 8, 2, ENABLE | MEMORY);
    u32 first = config_read(physical, start + 0x14, 2), stride = config_read(physical, start + 0x16, 2);
    for (u32 i = 0; i < count; i++) {
        struct function function = {.at = physical + first + i * stride, .parent = -1};
        function.bars[0] = (struct bar){.kind = BAR_MEM32, .base = (base & ~0xfu) + i * size, .size = size};
        reach(function.bars[0].base, size);
        require(read32(stub_address(&function, STUB_MAGIC)) == STUB_MAGIC_VALUE, "%s has no register page", place_name(function.at));
        config_write(function.at, COMMAND, 2, BUS_MASTER);
        test_msix(&function);
        config_write(function.at, COMMAND, 2, 0);
    }
    config_write(physical, start + 8, 2, 0);
}

void guest(void) {
    pci_start();
    walk();
    apic_start();
    for (u32 i = 0; i < INTX_GSIS && FIRST_INTX_GSI + i < ioapic_pins(); i++)
        ioapic_route(FIRST_INTX_GSI + i, (u8)(INTX_VECTOR + i), true);
    interrupts_on();
    struct function *function;
    u32 n;
    for (n = 0; (function = stub(n)); n++) {
        config_write(function->at, COMMAND, 2, DECODE_MEMORY | BUS_MASTER | INTX_OFF);
        if (msix_vectors(function->at))
            test_msix(function);
        else if (msi_vectors(function->at))
            test_msi(function);
        else if (function->pin)
            test_intx(function);
        else
            say("nothing to test at %s\n", place_name(function->at));
        config_write(function->at, COMMAND, 2, DECODE_MEMORY | INTX_OFF);
        test_virtual_functions(function);
    }
    require(n, "no stub with a register page");
}
