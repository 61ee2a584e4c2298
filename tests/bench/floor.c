/* The floor of start-up time: what any program must do with KVM before a guest's first byte, and nothing else.
 *
 *   floor MEBIBYTES      guest memory; prints X once the guest has written it to the serial port
 *
 * One memory slot, the interrupt controllers, one vCPU with the host's CPUID, three instructions in real mode. The slot is set
 * first: as soon as interrupt controllers or vCPUs exist, KVM makes each change of slots wait for a grace period. */
#include <fcntl.h>
#include <linux/kvm.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SERIAL = 0x3f8, ENTRY = 0x1000, TSS = 0xfffbd000, MOST_CPUID = 256 };

static const uint8_t guest[] = {
    0xba, SERIAL & 0xff, SERIAL >> 8, /* mov $0x3f8, %dx */
    0xb0, 'X',                        /* mov $'X', %al */
    0xee,                             /* out %al, %dx */
    0xf4,                             /* hlt */
};

static int must(int result, const char *step) {
    if (result < 0) {
        perror(step);
        exit(2);
    }
    return result;
}

static void *map(size_t length, int flags, int file) {
    void *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, flags, file, 0);
    must(memory == MAP_FAILED ? -1 : 0, "mmap");
    return memory;
}

int main(int argc, char **argv) {
    size_t ram = (size_t)(argc > 1 ? atoi(argv[1]) : 128) << 20;
    int kvm = must(open("/dev/kvm", O_RDWR | O_CLOEXEC), "/dev/kvm");
    int vm = must(ioctl(kvm, KVM_CREATE_VM, 0), "KVM_CREATE_VM");

    uint8_t *memory = map(ram, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1);
    struct kvm_userspace_memory_region slot = {.memory_size = ram, .userspace_addr = (uintptr_t)memory};
    must(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &slot), "KVM_SET_USER_MEMORY_REGION");
    memcpy(memory + ENTRY, guest, sizeof guest);

    must(ioctl(vm, KVM_SET_TSS_ADDR, TSS), "KVM_SET_TSS_ADDR");
    must(ioctl(vm, KVM_CREATE_IRQCHIP, 0), "KVM_CREATE_IRQCHIP");
    int vcpu = must(ioctl(vm, KVM_CREATE_VCPU, 0), "KVM_CREATE_VCPU");
    size_t run_size = (size_t)must(ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), "KVM_GET_VCPU_MMAP_SIZE");
    struct kvm_run *run = map(run_size, MAP_SHARED, vcpu);

    struct kvm_cpuid2 *cpuid = calloc(1, sizeof *cpuid + MOST_CPUID * sizeof *cpuid->entries);
    must(cpuid ? 0 : -1, "calloc");
    cpuid->nent = MOST_CPUID;
    must(ioctl(kvm, KVM_GET_SUPPORTED_CPUID, cpuid), "KVM_GET_SUPPORTED_CPUID");
    must(ioctl(vcpu, KVM_SET_CPUID2, cpuid), "KVM_SET_CPUID2");

    struct kvm_sregs segments;
    must(ioctl(vcpu, KVM_GET_SREGS, &segments), "KVM_GET_SREGS");
    segments.cs.base = 0;
    segments.cs.selector = 0;
    must(ioctl(vcpu, KVM_SET_SREGS, &segments), "KVM_SET_SREGS");
    struct kvm_regs registers = {.rip = ENTRY, .rflags = 2};
    must(ioctl(vcpu, KVM_SET_REGS, &registers), "KVM_SET_REGS");

    must(ioctl(vcpu, KVM_RUN, 0), "KVM_RUN");
    if (run->exit_reason != KVM_EXIT_IO || run->io.port != SERIAL) {
        fprintf(stderr, "floor: unexpected exit %u\n", run->exit_reason);
        return 1;
    }
    must((int)write(STDOUT_FILENO, (uint8_t *)run + run->io.data_offset, 1), "write");
    pause(); /* so that the measuring side can read the resident memory */
    return 0;
}
