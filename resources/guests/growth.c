/* Follows processors and memory that come and go, by the registers that ACPI's methods use: starts each processor that
 * comes, gives back each that is asked for, uses memory that comes. Prints what it did; ends at a line of input.
 * `keep=1`: gives back nothing; `reset=1`: a line resets the machine. */
#include "ioapic.h"
#include "runtime.h"

enum { EVENTS = 0x620, CPU_NEXT = 0x624, MEMORY_NEXT = 0x628, CPU_STATE = 0x700, MEMORY_DEVICE = 0x800, MEMORY_DEVICE_LEN = 24 };
enum { CPU_EVENT = 1, MEMORY_EVENT = 2, BUTTON_EVENT = 4, DEVICE_CHECK = 1, EJECT_REQUEST = 3, PRESENT = 1, EJECT = 8 };
enum { EVENT_GSI = 9, EVENT_VECTOR = 0x30 };
enum { COMMAND_LOW = 0x300, COMMAND_HIGH = 0x310, INIT = 0x4500, STARTUP = 0x4608, TRAMPOLINE = 0x8000 };
#define NOTHING 0xffffffffu

extern u8 processor_trampoline[], processor_trampoline_end[];
static volatile u32 started;
static volatile u32 last;

void processor_started(void) {
    last = apic_id();
    __atomic_fetch_add(&started, 1, __ATOMIC_SEQ_CST);
}

/* Its APIC id is its number: one package. */
static void start(u32 number) {
    u32 before = started;
    apic_write(COMMAND_HIGH, number << 24);
    apic_write(COMMAND_LOW, INIT);
    for (u32 i = 0; i < 100; i++)
        short_pause();
    apic_write(COMMAND_HIGH, number << 24);
    apic_write(COMMAND_LOW, STARTUP);
    for (u32 i = 0; i < 1000000 && started == before; i++)
        short_pause();
    require(started == before + 1 && last == number, "processor %u does not start", number);
}

static void processor(u32 next) {
    u32 number = next & 0xffff, code = next >> 16;
    if (code == DEVICE_CHECK) {
        require(in8((u16)(CPU_STATE + number)) == PRESENT, "processor %u came and is not there", number);
        start(number);
        say("processor %u came\n", number);
    } else if (code == EJECT_REQUEST && !option("keep", 0)) {
        out8((u16)(CPU_STATE + number), EJECT);
        require(in8((u16)(CPU_STATE + number)) == 0, "processor %u went and is still there", number);
        say("processor %u went\n", number);
    } else {
        require(code == EJECT_REQUEST, "processor %u: code %u", number, code);
        say("processor %u stays\n", number);
    }
}

static u64 pair(u16 port) { return (u64)in32((u16)(port + 4)) << 32 | in32(port); }

static void memory(u32 number, const char *what) {
    u16 port = (u16)(MEMORY_DEVICE + number * MEMORY_DEVICE_LEN);
    u64 base = pair(port), size = pair((u16)(port + 8));
    require(in32((u16)(port + 20)) == PRESENT && size, "memory device %u is not there", number);
    u64 ends[2] = {base, base + size - 8};
    for (u32 i = 0; i < 2; i++) {
        reach(ends[i], 8);
        u64 value = ends[i] * 0x9e3779b97f4a7c15;
        if (what[0] == 'c')
            write64(ends[i], value);
        require(read64(ends[i]) == value, "memory at %lx does not keep its value", ends[i]);
    }
    say("memory %lx size %lx node %u %s\n", base, size, in32((u16)(port + 16)), what);
}

void guest(void) {
    __builtin_memcpy((void *)TRAMPOLINE, processor_trampoline, (size_t)(processor_trampoline_end - processor_trampoline));
    interrupts_start();
    apic_start();
    ioapic_route(EVENT_GSI, EVENT_VECTOR, false);
    interrupts_on();
    say("processors");
    for (u32 number = 0; number < 255; number++)
        if (in8((u16)(CPU_STATE + number)) == PRESENT)
            say(" %u", number);
    say("\n");
    for (u32 number = 0; number < 48 && in32((u16)(MEMORY_DEVICE + number * MEMORY_DEVICE_LEN + 20)) == PRESENT; number++)
        memory(number, "stayed");
    /* What nobody asked for is not taken. */
    out8(CPU_STATE, EJECT);
    require(in8(CPU_STATE) == PRESENT || in8(CPU_STATE) == 0xff, "the first processor can be given back");
    say("ready\n");
    u32 seen = 0, looks = 0;
    for (;;) {
        if (serial_read() >= 0) {
            if (option("reset", 0))
                out8(0xcf9, 6);
            return;
        }
        if (seen == interrupt_count[EVENT_VECTOR]) {
            rest(&looks);
            continue;
        }
        looks = 0;
        seen = interrupt_count[EVENT_VECTOR];
        u32 events = in32(EVENTS);
        if (events & CPU_EVENT)
            for (u32 next = in32(CPU_NEXT); next != NOTHING; next = in32(CPU_NEXT))
                processor(next);
        if (events & MEMORY_EVENT)
            for (u32 next = in32(MEMORY_NEXT); next != NOTHING; next = in32(MEMORY_NEXT))
                memory(next & 0xffff, "came");
        if (events & BUTTON_EVENT)
            say("button\n");
    }
}
