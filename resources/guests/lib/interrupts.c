/* The interrupt table and the local APIC (Intel SDM 3A chapters 6 and 11, xAPIC mode). */
#include "runtime.h"

enum { APIC = 0xfee00000, APIC_ID = 0x20, APIC_EOI = 0xb0, APIC_SPURIOUS = 0xf0, APIC_TIMER = 0x320, APIC_LINT0 = 0x350 };
enum { APIC_COUNT = 0x380, APIC_DIVIDE = 0x3e0, DIVIDE_BY_1 = 0xb, TWO_MILLISECONDS = 2000000, AT_ONCE = 500 };

struct gate { u16 low, selector; u16 flags, middle; u32 high, reserved; };
struct frame {
    u64 registers[15], vector, error, rip, cs, flags, rsp, ss;
};

extern u8 interrupt_stubs[VECTOR_COUNT][16];
static struct gate idt[VECTOR_COUNT];
volatile u32 interrupt_count[VECTOR_COUNT];
void (*volatile interrupt_hook)(u32 vector);

void interrupt_entered(struct frame *frame) {
    if (frame->vector < FIRST_VECTOR) {
        u64 cr2;
        __asm__ volatile("mov %%cr2, %0" : "=r"(cr2));
        fail("exception %lu error %lx at %lx, cr2 %lx", frame->vector, frame->error, frame->rip, cr2);
    }
    if (frame->vector != REST_VECTOR) {
        __atomic_fetch_add(&interrupt_count[frame->vector], 1, __ATOMIC_RELAXED);
        if (interrupt_hook)
            interrupt_hook((u32)frame->vector);
    }
    if (frame->vector != SPURIOUS_VECTOR)
        apic_write(APIC_EOI, 0);
}

void load_idt(void) {
    struct __attribute__((packed)) { u16 limit; u64 base; } pointer = {sizeof idt - 1, (u64)idt};
    __asm__ volatile("lidt %0" ::"m"(pointer));
}

void interrupts_start(void) {
    for (u32 vector = 0; vector < VECTOR_COUNT; vector++) {
        u64 stub = (u64)interrupt_stubs[vector];
        idt[vector] = (struct gate){(u16)stub, 0x08, 0x8e00, (u16)(stub >> 16), (u32)(stub >> 32), 0};
    }
    load_idt();
}

u32 apic_read(u32 offset) { return read32(APIC + offset); }
void apic_write(u32 offset, u32 value) { write32(APIC + offset, value); }
u32 apic_id(void) { return apic_read(APIC_ID) >> 24; }

void apic_start(void) {
    out8(0x21, 0xff); /* the old interrupt controllers stay silent */
    out8(0xa1, 0xff);
    apic_write(APIC_LINT0, 0x10000);
    apic_write(APIC_SPURIOUS, 0x100 | SPURIOUS_VECTOR);
}

bool interrupt_arrives(u32 vector, u32 before) {
    for (u32 tries = 0; tries < 100000; tries++) {
        if (interrupt_count[vector] != before)
            return true;
        short_pause();
    }
    return false;
}

/* KVM's local APIC counts nanoseconds. */
void rest(u32 *looks) {
    static bool started;
    u64 flags;
    if (++*looks < AT_ONCE) {
        short_pause();
        return;
    }
    if (!started)
        apic_start();
    started = true;
    __asm__ volatile("pushf; pop %0; cli" : "=r"(flags)::"memory");
    apic_write(APIC_DIVIDE, DIVIDE_BY_1);
    apic_write(APIC_TIMER, REST_VECTOR);
    apic_write(APIC_COUNT, TWO_MILLISECONDS);
    /* What comes before the processor sleeps wakes it: sti takes effect after hlt has begun. */
    __asm__ volatile("sti; hlt; cli; push %0; popf" ::"r"(flags) : "memory", "cc");
}
