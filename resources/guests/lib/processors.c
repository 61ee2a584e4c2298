/* Starts all other processors by INIT and SIPI (Intel SDM 3A 9.4): each calls processor_started(). */
#include "runtime.h"

enum { COMMAND_LOW = 0x300, INIT_OTHERS = 0x000c4500, STARTUP_OTHERS = 0x000c4608, TRAMPOLINE = 0x8000 };

extern u8 processor_trampoline[], processor_trampoline_end[];

void start_others(const volatile u32 *count, u32 wanted) {
    __builtin_memcpy((void *)TRAMPOLINE, processor_trampoline, (size_t)(processor_trampoline_end - processor_trampoline));
    apic_start();
    apic_write(COMMAND_LOW, INIT_OTHERS);
    for (u32 i = 0; i < 100; i++)
        short_pause();
    apic_write(COMMAND_LOW, STARTUP_OTHERS);
    for (u32 i = 0; i < 1000000 && *count < wanted; i++)
        short_pause();
}
