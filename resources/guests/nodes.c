/* Prints what SRAT and SLIT (ACPI 6.5, 5.2.16 and 5.2.17) tell of memory nodes: `node N processors P memory SIZE far D0 D1 ...`
 * for each, memory of the start only. RAM and all enabled processors must be in nodes. */
#include "acpi.h"
#include "runtime.h"

enum { MOST = 16, HEADER = 48, SLIT_HEADER = 44, RAM = 1 };
enum { LOCAL_APIC = 0, MEMORY = 1, X2APIC = 2, ENABLED = 1, HOT_PLUG = 2 };

static u32 processors[MOST], known;
static u64 sizes[MOST];

static u32 node(u32 domain) {
    require(domain < MOST, "node %u is too large", domain);
    if (domain >= known)
        known = domain + 1;
    return domain;
}

void guest(void) {
    const struct acpi_header *srat = acpi_table("SRAT"), *slit = acpi_table("SLIT");
    require(srat, "no SRAT");
    for (u64 at = (u64)srat + HEADER, end = (u64)srat + srat->length; at + 2 <= end && read8(at + 1) >= 2; at += read8(at + 1)) {
        u8 type = read8(at);
        if (type == LOCAL_APIC && read32(at + 4) & ENABLED)
            processors[node(read8(at + 2) | (read32(at + 8) & 0xffffff00))]++;
        if (type == X2APIC && read32(at + 12) & ENABLED)
            processors[node(read32(at + 4))]++;
        if (type == MEMORY && (read32(at + 28) & (ENABLED | HOT_PLUG)) == ENABLED)
            sizes[node(read32(at + 2))] += read64(at + 16);
    }
    u64 count = slit ? read64((u64)slit + 36) : 0;
    for (u32 from = 0; from < known; from++) {
        say("node %u processors %u memory %lx far", from, processors[from], sizes[from]);
        for (u64 to = 0; to < count; to++)
            say(" %u", read8((u64)slit + SLIT_HEADER + from * count + to));
        say("\n");
    }
    u64 told = 0, there = 0;
    for (u32 i = 0; i < known; i++)
        told += sizes[i];
    for (u32 i = 0; i < memory_range_count; i++)
        if (memory_ranges[i].type == RAM)
            there += memory_ranges[i].end - memory_ranges[i].start;
    require(told >= there && told - there <= 1 << 20, "nodes have %lx of memory, and %lx are there", told, there);
}
