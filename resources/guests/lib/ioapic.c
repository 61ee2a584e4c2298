/* Finds the controller in the MADT, else uses its usual address. */
#include "ioapic.h"
#include "acpi.h"
#include "runtime.h"

enum { USUAL_ADDRESS = 0xfec00000, VERSION = 1, REDIRECTION = 0x10, LEVEL = 1 << 15, ACTIVE_LOW = 1 << 13, MASKED = 1 << 16 };

static u64 ioapic_address(void) {
    static u64 address;
    if (!address) {
        const u8 *entry = madt_entry(1, 0);
        address = entry ? reach(read32((u64)entry + 4), 0x20) : USUAL_ADDRESS;
    }
    return address;
}

static u32 ioapic_read(u32 which) {
    u64 at = ioapic_address();
    write32(at, which);
    return read32(at + 0x10);
}

static void ioapic_write(u32 which, u32 value) {
    u64 at = ioapic_address();
    write32(at, which);
    write32(at + 0x10, value);
}

u32 ioapic_pins(void) { return (ioapic_read(VERSION) >> 16 & 0xff) + 1; }

void ioapic_route(u32 gsi, u8 vector, bool level) {
    ioapic_write(REDIRECTION + 2 * gsi + 1, apic_id() << 24);
    ioapic_write(REDIRECTION + 2 * gsi, vector | (level ? LEVEL | ACTIVE_LOW : 0));
}

void ioapic_mask(u32 gsi) { ioapic_write(REDIRECTION + 2 * gsi, MASKED); }
