/* Starts all other processors by INIT and SIPI; each notes its APIC id from the register and from CPUID. Fails unless
 * exactly the processors of the MADT start. `cpus=N` states how many there must be. */
#include "acpi.h"
#include "runtime.h"

static volatile u8 started[256], agreed[256];
static u8 listed[256];
static volatile u32 count;

void processor_started(void) {
    u32 leaf[4], id = apic_id();
    cpuid(1, 0, leaf);
    agreed[id] = leaf[1] >> 24 == id;
    started[id] = 1;
    __atomic_fetch_add(&count, 1, __ATOMIC_SEQ_CST);
}

/* Notes the enabled processors of the MADT: local APIC (0) and x2APIC (9) entries. Returns how many there are. */
static u32 read_madt(void) {
    const struct acpi_header *madt = acpi_table("APIC");
    require(madt, "no MADT");
    u32 found = 0;
    for (const u8 *entry = (const u8 *)madt + 44; entry + 2 <= (const u8 *)madt + madt->length && entry[1] >= 2; entry += entry[1]) {
        bool local = entry[0] == 0 && entry[4] & 1, extended = entry[0] == 9 && entry[8] & 1;
        u32 id = local ? entry[3] : extended ? read32((u64)entry + 4) : 0;
        if (!local && !extended)
            continue;
        require(id < 255 && !listed[id], "APIC id %u in the MADT is too large or listed twice", id);
        listed[id] = 1;
        found++;
    }
    return found;
}

void guest(void) {
    u32 expected = read_madt();
    processor_started();
    u32 wanted = (u32)option("cpus", expected);
    start_others(&count, wanted);
    for (u32 id = 0; id < 256; id++) {
        if (!started[id])
            continue;
        say("cpu %u\n", id);
        require(listed[id], "processor %u is not in the MADT", id);
        require(agreed[id], "processor %u: CPUID has another APIC id", id);
    }
    require(count == wanted && expected == wanted, "%u processors started, %u in the MADT, want %u", count, expected, wanted);
}
