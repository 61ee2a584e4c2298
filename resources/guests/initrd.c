/* Prints place, size and checksum of the first module. The checksum takes the first 8 bytes of each 4 KiB page and the
 * last 8 bytes of the module, little endian: sum = rotate_left(sum, 1) ^ word. Fails unless the module lies in RAM,
 * clear of this image; `checksum=` states the value it must have. */
#include "runtime.h"

extern u8 image_end[];

void guest(void) {
    require(module_count, "no module");
    u64 start = modules[0].start, size = modules[0].size, sum = 0;
    require(size >= 8, "module of %lu bytes", size);
    reach(start, size);
    for (u64 offset = 0; offset + 8 <= size; offset += 4096)
        sum = (sum << 1 | sum >> 63) ^ read64(start + offset);
    sum = (sum << 1 | sum >> 63) ^ read64(start + size - 8);
    say("initrd at %lx size %lx checksum %lx\n", start, size, sum);
    bool in_ram = false;
    for (u32 i = 0; i < memory_range_count; i++)
        in_ram |= memory_ranges[i].type == 1 && memory_ranges[i].start <= start && memory_ranges[i].end >= start + size;
    require(in_ram, "the module is not in RAM");
    require(start >= (u64)image_end || start + size <= 0x100000, "the module overlaps the kernel");
    u64 wanted = option("checksum", sum);
    require(wanted == sum, "checksum %lx, want %lx", sum, wanted);
}
