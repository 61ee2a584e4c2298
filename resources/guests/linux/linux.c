/* A kernel that only checks how it was booted by the 64-bit Linux protocol: the zero page (Linux
 * Documentation/arch/x86/zero-page.rst), its memory map, the command line and the initial RAM disk. */
#include "runtime.h"

const char *command_line = "";

static u64 wide(u64 zero_page, u32 low, u32 high) {
    return read32(zero_page + low) | (u64)read32(zero_page + high) << 32;
}

static bool in_ram(u64 zero_page, u64 start, u64 end) {
    for (u32 i = 0; i < read8(zero_page + 0x1e8); i++) {
        u64 entry = zero_page + 0x2d0 + 20 * i;
        if (read32(entry + 16) == 1 && read64(entry) <= start && end <= read64(entry) + read64(entry + 8))
            return true;
    }
    return false;
}

void linux_start(u64 zero_page, u64 entry) {
    out8(0x3f8 + 3, 3);
    say("entered at %lx, zero page at %lx, code32_start %x\n", entry, zero_page, read32(zero_page + 0x214));
    require(read16(zero_page + 0x1fe) == 0xaa55, "boot flag %x", read16(zero_page + 0x1fe));
    require(read32(zero_page + 0x202) == 0x53726448, "header magic %x", read32(zero_page + 0x202));
    require(read16(zero_page + 0x206) >= 0x020c, "protocol version %x", read16(zero_page + 0x206));
    require(read8(zero_page + 0x210), "no loader type");
    command_line = (const char *)wide(zero_page, 0x228, 0xc8);
    if (!command_line)
        command_line = "";
    say("command line: %s\n", command_line);
    u32 entries = read8(zero_page + 0x1e8);
    require(entries > 0 && entries <= 128, "%u memory map entries", entries);
    for (u32 i = 0; i < entries; i++) {
        u64 at = zero_page + 0x2d0 + 20 * i;
        say("range %lx-%lx type %u\n", read64(at), read64(at) + read64(at + 8), read32(at + 16));
    }
    require(in_ram(zero_page, entry, entry + 4096), "this image is not in RAM");
    u64 tables = read64(zero_page + 0x70);
    require(tables && bytes_equal((const void *)tables, "RSD PTR ", 8), "no RSDP at %lx", tables);
    u64 start = wide(zero_page, 0x218, 0xc0), size = wide(zero_page, 0x21c, 0xc4);
    if (size) {
        say("initrd at %lx size %lx checksum %lx\n", start, size, page_checksum(start, size));
        require(in_ram(zero_page, start, start + size), "the initrd is not in RAM");
        require(start + size <= entry || start >= entry + 0x10000, "the initrd overlaps the kernel");
    }
    say("PASS\n");
    debug_exit(0);
}
