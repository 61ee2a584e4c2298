/* ACPI tables as far as a guest without an interpreter can read them. */
#pragma once
#include "cpu.h"

struct acpi_header {
    char signature[4];
    u32 length;
    u8 revision, checksum;
    char oem[6], oem_table[8];
    u32 oem_revision, creator, creator_revision;
} __attribute__((packed));

/* The first table with this signature whose checksum is right, or NULL. */
const struct acpi_header *acpi_table(const char *signature);
/* The n-th entry of the given type in the MADT (ACPI 6.5, 5.2.12), or NULL. */
const u8 *madt_entry(u8 type, u32 n);
/* The memory node (`_PXM`) of the root bridge of this bus in DSDT, or -1 when none is told. */
int root_node(u32 segment, u32 bus);
