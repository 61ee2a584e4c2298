/* Prints the memory map of the start information, checks it, and writes the first and last page of each RAM range.
 * `ram=BYTES` states the sum that RAM ranges must have at least, less 1 MiB for what lies below. */
#include "acpi.h"
#include "runtime.h"

enum { RAM = 1, RESERVED = 2 };
extern u8 image_end[];

static void touch(u64 address) {
    reach(address, 8);
    u64 old = read64(address), value = address * 0x9e3779b97f4a7c15;
    write64(address, value);
    require(read64(address) == value, "memory at %lx does not keep its value", address);
    write64(address, old);
}

static bool covered_as(u32 type, u64 start, u64 end) {
    for (u32 i = 0; i < memory_range_count; i++)
        if (memory_ranges[i].type == type && memory_ranges[i].start <= start && memory_ranges[i].end >= end)
            return true;
    return false;
}

void guest(void) {
    u64 sum = 0, previous = 0;
    require(memory_range_count, "empty memory map");
    for (u32 i = 0; i < memory_range_count; i++) {
        struct memory_range *range = &memory_ranges[i];
        say("range %lx-%lx type %u\n", range->start, range->end, range->type);
        require(range->end > range->start, "empty range at %lx", range->start);
        require(range->start >= previous, "range at %lx overlaps or is out of order", range->start);
        previous = range->end;
        if (range->type != RAM)
            continue;
        sum += range->end - range->start;
        touch(range->start < 0x1000 ? 0x1000 : range->start & ~7ull);
        touch((range->end & ~7ull) - 8);
    }
    say("ram %lx\n", sum);
    require(covered_as(RAM, 0x100000, (u64)image_end), "this image is not in RAM");
    u64 wanted = option("ram", 0);
    require(!wanted || (sum <= wanted && sum + (1 << 20) >= wanted), "RAM ranges sum up to %lx, want %lx", sum, wanted);
    const struct acpi_header *mcfg = acpi_table("MCFG");
    for (u64 at = (u64)mcfg + 44; mcfg && at + 16 <= (u64)mcfg + mcfg->length; at += 16) {
        u64 start = read64(at) + ((u64)read8(at + 10) << 20), end = read64(at) + (((u64)read8(at + 11) + 1) << 20);
        require(covered_as(RESERVED, start, end), "ECAM %lx-%lx is not reserved", start, end);
    }
}
