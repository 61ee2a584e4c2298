/* The instructions that C has no words for: ports, memory-mapped registers, MSRs, CPUID.
 * Register accesses are single mov instructions, so that every hypervisor decodes them the same way. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

static inline void out8(u16 port, u8 value) { __asm__ volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }
static inline void out16(u16 port, u16 value) { __asm__ volatile("outw %0, %1" ::"a"(value), "Nd"(port)); }
static inline void out32(u16 port, u32 value) { __asm__ volatile("outl %0, %1" ::"a"(value), "Nd"(port)); }

static inline u8 in8(u16 port) {
    u8 value;
    __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}
static inline u16 in16(u16 port) {
    u16 value;
    __asm__ volatile("inw %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}
static inline u32 in32(u16 port) {
    u32 value;
    __asm__ volatile("inl %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static inline u8 read8(u64 address) {
    u8 value;
    __asm__ volatile("movb (%1), %0" : "=r"(value) : "r"(address) : "memory");
    return value;
}
static inline u16 read16(u64 address) {
    u16 value;
    __asm__ volatile("movw (%1), %0" : "=r"(value) : "r"(address) : "memory");
    return value;
}
static inline u32 read32(u64 address) {
    u32 value;
    __asm__ volatile("movl (%1), %0" : "=r"(value) : "r"(address) : "memory");
    return value;
}
static inline u64 read64(u64 address) {
    u64 value;
    __asm__ volatile("movq (%1), %0" : "=r"(value) : "r"(address) : "memory");
    return value;
}
static inline void write8(u64 address, u8 value) { __asm__ volatile("movb %0, (%1)" ::"r"(value), "r"(address) : "memory"); }
static inline void write16(u64 address, u16 value) { __asm__ volatile("movw %0, (%1)" ::"r"(value), "r"(address) : "memory"); }
static inline void write32(u64 address, u32 value) { __asm__ volatile("movl %0, (%1)" ::"r"(value), "r"(address) : "memory"); }
static inline void write64(u64 address, u64 value) { __asm__ volatile("movq %0, (%1)" ::"r"(value), "r"(address) : "memory"); }

static inline u64 read_msr(u32 msr) {
    u32 low, high;
    __asm__ volatile("rdmsr" : "=a"(low), "=d"(high) : "c"(msr));
    return (u64)high << 32 | low;
}
static inline void write_msr(u32 msr, u64 value) {
    __asm__ volatile("wrmsr" ::"c"(msr), "a"((u32)value), "d"((u32)(value >> 32)));
}

static inline void cpuid(u32 leaf, u32 subleaf, u32 result[4]) {
    __asm__ volatile("cpuid" : "=a"(result[0]), "=b"(result[1]), "=c"(result[2]), "=d"(result[3]) : "a"(leaf), "c"(subleaf));
}

static inline void interrupts_on(void) { __asm__ volatile("sti" ::: "memory"); }
static inline void interrupts_off(void) { __asm__ volatile("cli" ::: "memory"); }

/* Takes a little time on every machine: port 0x80 belongs to nobody and its read leaves the guest. */
static inline void short_pause(void) { (void)in8(0x80); }
