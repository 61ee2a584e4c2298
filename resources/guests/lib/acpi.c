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
