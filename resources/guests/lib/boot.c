/* Reads the start information (Xen: public/arch-x86/hvm/start_info.h) and owns the page tables. */
#include "runtime.h"

enum { START_MAGIC = 0x336ec578, PAGE = 4096, POOL_PAGES = 256 };

struct start_info {
    u32 magic, version, flags, module_count;
    u64 modules, command_line, rsdp, memory_map;
    u32 memory_map_entries, reserved;
};
struct module_entry { u64 address, size, command_line, reserved; };
struct memory_map_entry { u64 address, size; u32 type, reserved; };

const char *command_line = "";
u64 rsdp_address;
struct memory_range memory_ranges[64];
u32 memory_range_count;
struct module modules[4];
u32 module_count;

extern u64 page_map_level_4[512];
extern u8 gigabyte_pages;
static __attribute__((section(".scratch,\"aw\",@nobits#"), aligned(4096))) u64 pool[POOL_PAGES][512];
static u32 pool_used;

void guest(void);

static u64 *table_below(u64 *entry) {
    if (!(*entry & 1)) {
        require(pool_used < POOL_PAGES, "page table pool is empty");
        u64 *table = pool[pool_used++];
        __builtin_memset(table, 0, PAGE);
        *entry = (u64)table | 3;
    }
    return (u64 *)(*entry & 0x000ffffffffff000);
}

u32 physical_address_bits(void) {
    static u32 bits;
    u32 leaf[4];
    if (!bits) {
        cpuid(0x80000008, 0, leaf);
        bits = (leaf[0] & 0xff) < 47 ? leaf[0] & 0xff : 47;
    }
    return bits;
}

u64 reach(u64 address, u64 size) {
    u64 limit = 1ull << physical_address_bits();
    require(size && address < limit && size <= limit - address, "cannot map %lx bytes at %lx", size, address);
    u64 step = gigabyte_pages ? 1ull << 30 : 1ull << 21;
    for (u64 at = address & ~(step - 1); at < address + size; at += step) {
        u64 *entry = table_below(&page_map_level_4[at >> 39]) + (at >> 30 & 511);
        if (!gigabyte_pages)
            entry = table_below(entry) + (at >> 21 & 511);
        if (!(*entry & 1))
            *entry = at | 0x83;
    }
    return address;
}

void runtime_start(const struct start_info *info) {
    out8(0x3f8 + 3, 3); /* 8 data bits, no parity; divisor latch closed */
    interrupts_start();
    require(info->magic == START_MAGIC, "start information has magic %x", info->magic);
    if (info->command_line)
        command_line = (const char *)reach(info->command_line, PAGE);
    rsdp_address = info->rsdp;
    const struct module_entry *entry = (const void *)info->modules;
    for (u32 i = 0; i < info->module_count && i < 4; i++)
        modules[module_count++] = (struct module){entry[i].address, entry[i].size};
    const struct memory_map_entry *map = (const void *)info->memory_map;
    for (u32 i = 0; info->version >= 1 && i < info->memory_map_entries && i < 64; i++)
        memory_ranges[memory_range_count++] = (struct memory_range){map[i].address, map[i].address + map[i].size, map[i].type};
    guest();
    pass();
}
