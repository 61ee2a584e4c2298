/* Finds tables from the RSDP that the start information names. */
#include "acpi.h"
#include "runtime.h"

static bool sum_is_zero(u64 address, u32 length) {
    u8 sum = 0;
    for (u32 i = 0; i < length; i++)
        sum = (u8)(sum + read8(address + i));
    return sum == 0;
}

const struct acpi_header *acpi_table(const char *signature) {
    if (!rsdp_address || !bytes_equal((const void *)reach(rsdp_address, 36), "RSD PTR ", 8))
        return NULL;
    bool extended = read8(rsdp_address + 15) >= 2;
    u64 root = extended ? read64(rsdp_address + 24) : read32(rsdp_address + 16);
    u32 entry_size = extended ? 8 : 4;
    if (!root)
        return NULL;
    const struct acpi_header *directory = (const void *)reach(root, sizeof *directory);
    reach(root, directory->length);
    for (u32 offset = sizeof *directory; offset + entry_size <= directory->length; offset += entry_size) {
        u64 at = extended ? read64(root + offset) : read32(root + offset);
        const struct acpi_header *table = (const void *)reach(at, sizeof *table);
        if (!bytes_equal(table->signature, signature, 4))
            continue;
        reach(at, table->length);
        if (sum_is_zero(at, table->length))
            return table;
    }
    return NULL;
}

const u8 *madt_entry(u8 type, u32 n) {
    const struct acpi_header *madt = acpi_table("APIC");
    if (!madt)
        return NULL;
    const u8 *table = (const u8 *)madt;
    for (u32 offset = 44; offset + 2 <= madt->length && table[offset + 1] >= 2; offset += table[offset + 1])
        if (table[offset] == type && n-- == 0)
            return table + offset;
    return NULL;
}

/* A constant integer at `at` of AML (ACPI 6.5, 20.2.3), or -1. */
static int aml_integer(const u8 *at) {
    switch (at[0]) {
    case 0x00: return 0;
    case 0x01: return 1;
    case 0x0a: return at[1];
    case 0x0b: return at[1] | at[2] << 8;
    case 0x0c: return (int)(at[1] | at[2] << 8 | at[3] << 16 | (u32)at[4] << 24);
    default: return -1;
    }
}

/* Names of a root bridge come in this order: _SEG, _BBN, _PXM. No interpreter: constants alone are understood. */
int root_node(u32 segment, u32 bus) {
    const struct acpi_header *fadt = acpi_table("FACP");
    if (!fadt)
        return -1;
    u64 at = fadt->length >= 148 ? read64((u64)fadt + 140) : 0;
    if (!at)
        at = read32((u64)fadt + 40);
    if (!at)
        return -1;
    const struct acpi_header *dsdt = (const void *)reach(at, sizeof *dsdt);
    const u8 *bytes = (const void *)reach(at, dsdt->length);
    int bridge_segment = -1, bridge_bus = -1;
    for (u32 i = sizeof *dsdt; i + 10 <= dsdt->length; i++) {
        if (bytes[i] != 0x08)
            continue;
        int value = aml_integer(bytes + i + 5);
        if (bytes_equal(bytes + i + 1, "_SEG", 4))
            bridge_segment = value, bridge_bus = -1;
        else if (bytes_equal(bytes + i + 1, "_BBN", 4))
            bridge_bus = value;
        else if (bytes_equal(bytes + i + 1, "_PXM", 4) && bridge_segment == (int)segment && bridge_bus == (int)bus)
            return value;
    }
    return -1;
}
