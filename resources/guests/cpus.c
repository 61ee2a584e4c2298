/* Starts all other processors by INIT and SIPI; each notes its APIC id from the register and from CPUID. Fails unless
 * exactly the processors of the MADT start. `cpus=N` states how many there must be. */
#include "acpi.h"
#include "runtime.h"

enum { COMMAND_LOW = 0x300, INIT_OTHERS = 0x000c4500, STARTUP_OTHERS = 0x000c4608, TRAMPOLINE = 0x8000 };

extern u8 processor_trampoline[], processor_trampoline_end[];
static volatile u8 started[256], agreed[256];
static volatile u32 count;

void processor_started(void) {
    u32 leaf[4], id = apic_id();
    cpuid(1, 0, leaf);
    agreed[id] = leaf[1] >> 24 == id;
    started[id] = 1;
    __atomic_fetch_add(&count, 1, __ATOMIC_SEQ_CST);
}

static bool in_madt(u32 id) {
    const u8 *entry;
    for (u32 n = 0; (entry = madt_entry(0, n)); n++)
        if (entry[3] == id && entry[4] & 1)
            return true;
    for (u32 n = 0; (entry = madt_entry(9, n)); n++)
        if (read32((u64)entry + 4) == id && entry[8] & 1)
            return true;
    return false;
}

void guest(void) {
    u32 expected = 0;
    for (u32 id = 0; id < 255; id++)
        expected += in_madt(id);
    __builtin_memcpy((void *)TRAMPOLINE, processor_trampoline, (size_t)(processor_trampoline_end - processor_trampoline));
    processor_started();
    apic_start();
    apic_write(COMMAND_LOW, INIT_OTHERS);
    for (u32 i = 0; i < 100; i++)
        short_pause();
    apic_write(COMMAND_LOW, STARTUP_OTHERS);
    u32 wanted = (u32)option("cpus", expected);
    for (u32 i = 0; i < 1000000 && count < wanted; i++)
        short_pause();
    for (u32 id = 0; id < 256; id++) {
        if (!started[id])
            continue;
        say("cpu %u\n", id);
        require(in_madt(id), "processor %u is not in the MADT", id);
        require(agreed[id], "processor %u: CPUID has another APIC id", id);
    }
    require(count == wanted && expected == wanted, "%u processors started, %u in the MADT, want %u", count, expected, wanted);
}
