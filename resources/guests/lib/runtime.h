/* What every guest may use: output, strings, memory map, interrupts, ways to end. A guest provides `void guest(void)`. */
#pragma once
#include "cpu.h"

/* Console (console.c): the 16550 at 0x3F8 for people, port 0xE9 for the harness. */
enum channel { SERIAL, REPORT };
void put(enum channel channel, char c);
/* Formats %s %c %d %u %x with optional zero-filled width and `l`; nothing else. */
void print(enum channel channel, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define say(...) print(SERIAL, __VA_ARGS__)
#define report(...) print(REPORT, __VA_ARGS__)
int serial_read(void); /* next input byte, -1 when there is none */

/* Ways to end (console.c). Debug exit V makes the hypervisor's exit status (V << 1) | 1. */
__attribute__((noreturn)) void debug_exit(u8 value);
__attribute__((noreturn)) void power_off(void);
/* Prints `PASS` and ends with status 1, or `FAIL what` and ends with status 3. */
__attribute__((noreturn)) void pass(void);
__attribute__((noreturn, format(printf, 1, 2))) void fail(const char *format, ...);
/* Fails with the condition's meaning unless it holds. */
#define require(condition, ...)    \
    do {                           \
        if (!(condition))          \
            fail(__VA_ARGS__);     \
    } while (0)

/* Strings and memory (text.c). */
size_t text_length(const char *text);
bool text_equal(const char *a, const char *b);
bool bytes_equal(const void *a, const void *b, size_t size);
/* Sum over the first 8 bytes of each 4 KiB page and the last 8 bytes, little endian: sum = rotate_left(sum, 1) ^ word.
 * A checksum of every byte would take minutes where instructions are emulated. Needs at least 8 bytes. */
u64 page_checksum(u64 start, u64 size);
/* The value of `key=` in the command line, decimal or 0x hex; `otherwise` when the key is absent. */
u64 option(const char *key, u64 otherwise);
/* Copies the value of `key=` (up to a space) into `value`; false when the key is absent. */
bool option_text(const char *key, char *value, size_t size);

/* The boot loader's start information (boot.c). */
struct memory_range { u64 start, end; u32 type; };
struct module { u64 start, size; };
extern const char *command_line;
extern u64 rsdp_address;
extern struct memory_range memory_ranges[64];
extern u32 memory_range_count;
extern struct module modules[4];
extern u32 module_count;

/* Page tables (boot.c): makes an address range reachable one to one and returns its start. */
u64 reach(u64 address, u64 size);
/* Of the processor, at most 47: what four levels of page tables reach one to one. */
u32 physical_address_bits(void);

/* Interrupts (interrupts.c). Vectors 0x20 to 0x5D are for devices; 0x5E is rest()'s, which no hook hears of and nobody counts, and
 * 0x5F the spurious one. */
enum { VECTOR_COUNT = 96, FIRST_VECTOR = 0x20, REST_VECTOR = 0x5e, SPURIOUS_VECTOR = 0x5f };
extern volatile u32 interrupt_count[VECTOR_COUNT];
/* Called with the vector before the interrupt is acknowledged; may be NULL. */
extern void (*volatile interrupt_hook)(u32 vector);
void interrupts_start(void);
void load_idt(void);
u32 apic_id(void);
u32 apic_read(u32 offset);
void apic_write(u32 offset, u32 value);
void apic_start(void);
/* Waits until the vector's count differs from `before`; false after about a second. */
bool interrupt_arrives(u32 vector, u32 before);
/* Between two looks at what may come, of which the last `looks` found nothing: the next one comes at once, but for a long wait, in
 * which the processor sleeps two milliseconds before each. Adds one to `looks`; whoever finds something sets it to 0. */
void rest(u32 *looks);

/* Starts all other processors (processors.c) and waits for `count`, which processor_started() adds to, to become `wanted`;
 * about two seconds at most. A guest that uses it provides `void processor_started(void)`, which each of them runs. */
void start_others(const volatile u32 *count, u32 wanted);
