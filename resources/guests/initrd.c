/* Prints place, size and checksum of the first module. Fails unless the module lies in RAM, clear of this image;
 * `checksum=` states the value it must have. */
#include "runtime.h"

extern u8 image_end[];

void guest(void) {
    require(module_count, "no module");
    u64 start = modules[0].start, size = modules[0].size;
    require(size >= 8, "module of %lu bytes", size);
    reach(start, size);
    u64 sum = page_checksum(start, size);
    say("initrd at %lx size %lx checksum %lx\n", start, size, sum);
    bool in_ram = false;
    for (u32 i = 0; i < memory_range_count; i++)
        in_ram |= memory_ranges[i].type == 1 && memory_ranges[i].start <= start && memory_ranges[i].end >= start + size;
    require(in_ram, "the module is not in RAM");
    require(start >= (u64)image_end || start + size <= 0x100000, "the module overlaps the kernel");
    u64 wanted = option("checksum", sum);
    require(wanted == sum, "checksum %lx, want %lx", sum, wanted);
}
