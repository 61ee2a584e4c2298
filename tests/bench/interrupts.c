/* What one message interrupt costs by KVM_SIGNAL_MSI and by an irqfd, in one run and in turn: the sender's call, and the time
 * until the guest's handler has counted it; and what setting one up costs while the guest runs.
 * Guest: real mode with an x2APIC, a handler that counts and acknowledges; between interrupts it sleeps, or it runs. */
#include <fcntl.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { CODE = 0x1000, COUNT = 0x500, READY = 0x504, SLEEPS = 0x508, VECTOR = 0x40, GSI = 24, ROUNDS = 20, PER_ROUND = 50 };

__asm__(".code16\n"
        "guest_start:\n"
        "  mov $0x1b, %ecx\n rdmsr\n or $0xc00, %eax\n wrmsr\n"
        "  mov $0x80f, %ecx\n mov $0x1ff, %eax\n xor %edx, %edx\n wrmsr\n"
        "  movl $1, 0x504\n"
        "again:\n"
        "  sti\n cmpl $0, 0x508\n je running\n hlt\n"
        "running:\n"
        "  jmp again\n"
        "guest_handler:\n"
        "  push %eax\n push %ecx\n push %edx\n"
        "  incl 0x500\n"
        "  mov $0x80b, %ecx\n xor %eax, %eax\n xor %edx, %edx\n wrmsr\n"
        "  pop %edx\n pop %ecx\n pop %eax\n iret\n"
        "guest_end:\n"
        ".code64\n");
extern uint8_t guest_start[], guest_handler[], guest_end[];

static int vm, vcpu, event;
static uint8_t *memory;
static struct kvm_run *run;

static void check(int result, const char *what) {
    if (result < 0) {
        perror(what);
        exit(1);
    }
}

static volatile uint32_t *word(uint32_t at) { return (volatile uint32_t *)(memory + at); }

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static void *run_guest(void *unused) {
    (void)unused;
    for (;;) {
        if (ioctl(vcpu, KVM_RUN, 0) < 0)
            continue;
        fprintf(stderr, "interrupts: the guest left with exit %u\n", run->exit_reason);
        exit(1);
    }
}

static void set_routes(uint32_t count) {
    struct kvm_irq_routing *routes = calloc(1, sizeof *routes + count * sizeof *routes->entries);
    routes->nr = count;
    for (uint32_t i = 0; i < count; i++)
        routes->entries[i] = (struct kvm_irq_routing_entry){
            .gsi = GSI + i, .type = KVM_IRQ_ROUTING_MSI, .u.msi = {.address_lo = 0xfee00000, .data = VECTOR}};
    check(ioctl(vm, KVM_SET_GSI_ROUTING, routes), "KVM_SET_GSI_ROUTING");
    free(routes);
}

static void start(void) {
    int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    check(kvm, "/dev/kvm");
    check(vm = ioctl(kvm, KVM_CREATE_VM, 0), "KVM_CREATE_VM");
    memory = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct kvm_userspace_memory_region slot = {.memory_size = 1 << 20, .userspace_addr = (uint64_t)memory};
    check(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &slot), "KVM_SET_USER_MEMORY_REGION");
    check(ioctl(vm, KVM_SET_TSS_ADDR, 0xfffbd000), "KVM_SET_TSS_ADDR");
    check(ioctl(vm, KVM_CREATE_IRQCHIP, 0), "KVM_CREATE_IRQCHIP");
    memcpy(memory + CODE, guest_start, (size_t)(guest_end - guest_start));
    *(uint16_t *)(memory + 4 * VECTOR) = (uint16_t)(CODE + (guest_handler - guest_start));
    check(vcpu = ioctl(vm, KVM_CREATE_VCPU, 0), "KVM_CREATE_VCPU");
    struct kvm_cpuid2 *leaves = calloc(1, sizeof *leaves + 256 * sizeof *leaves->entries);
    leaves->nent = 256;
    check(ioctl(kvm, KVM_GET_SUPPORTED_CPUID, leaves), "KVM_GET_SUPPORTED_CPUID");
    check(ioctl(vcpu, KVM_SET_CPUID2, leaves), "KVM_SET_CPUID2");
    struct kvm_sregs segments;
    check(ioctl(vcpu, KVM_GET_SREGS, &segments), "KVM_GET_SREGS");
    segments.cs.base = segments.cs.selector = 0;
    check(ioctl(vcpu, KVM_SET_SREGS, &segments), "KVM_SET_SREGS");
    struct kvm_regs registers = {.rip = CODE, .rsp = 0x8000, .rflags = 2};
    check(ioctl(vcpu, KVM_SET_REGS, &registers), "KVM_SET_REGS");
    run = mmap(NULL, (size_t)ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
    pthread_t thread;
    pthread_create(&thread, NULL, run_guest, NULL);
    while (!*word(READY))
        usleep(100);
    set_routes(1);
    event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    struct kvm_irqfd irqfd = {.fd = (uint32_t)event, .gsi = GSI};
    check(ioctl(vm, KVM_IRQFD, &irqfd), "KVM_IRQFD");
}

static void by_message(void) {
    struct kvm_msi message = {.address_lo = 0xfee00000, .data = VECTOR};
    check(ioctl(vm, KVM_SIGNAL_MSI, &message), "KVM_SIGNAL_MSI");
}

static void by_event(void) {
    uint64_t one = 1;
    check((int)write(event, &one, sizeof one), "write to the irqfd");
}

static int ascending(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static uint64_t median(uint64_t *values, size_t count) {
    qsort(values, count, sizeof *values, ascending);
    return values[count / 2];
}

static void measure(const char *name) {
    static uint64_t calls[2][ROUNDS * PER_ROUND], counted[2][ROUNDS * PER_ROUND];
    size_t done[2] = {0, 0};
    for (int round = 0; round < 2 * ROUNDS; round++) {
        int way = round % 2;
        for (int i = 0; i < PER_ROUND; i++) {
            uint32_t before = *word(COUNT);
            uint64_t from = now();
            (way ? by_event : by_message)();
            uint64_t called = now();
            while (*word(COUNT) == before && now() - from < 1000000000)
                ;
            uint64_t seen = now();
            if (*word(COUNT) == before) {
                fprintf(stderr, "interrupts: one was lost\n");
                exit(1);
            }
            calls[way][done[way]] = called - from;
            counted[way][done[way]++] = seen - from;
        }
    }
    uint64_t m[4] = {median(calls[0], done[0]), median(calls[1], done[1]), median(counted[0], done[0]), median(counted[1], done[1])};
    printf("%-30s %6lu ns %6lu ns %6.2fx   %6lu ns %6lu ns %6.2fx\n", name, m[0], m[1], (double)m[1] / (double)m[0], m[2], m[3],
           (double)m[3] / (double)m[2]);
}

static void measure_set_up(void) {
    static uint64_t routes[200], irqfds[200], gone[200];
    for (uint32_t i = 0; i < 200; i++) {
        uint64_t from = now();
        set_routes(1 + i % 32);
        routes[i] = now() - from;
        int other = eventfd(0, EFD_CLOEXEC);
        struct kvm_irqfd irqfd = {.fd = (uint32_t)other, .gsi = GSI};
        from = now();
        check(ioctl(vm, KVM_IRQFD, &irqfd), "KVM_IRQFD");
        irqfds[i] = now() - from;
        irqfd.flags = KVM_IRQFD_FLAG_DEASSIGN;
        from = now();
        check(ioctl(vm, KVM_IRQFD, &irqfd), "KVM_IRQFD");
        gone[i] = now() - from;
        close(other);
    }
    printf("set-up of an irqfd while the guest runs: route table %lu us, attach %lu us, detach %lu us (medians)\n",
           median(routes, 200) / 1000, median(irqfds, 200) / 1000, median(gone, 200) / 1000);
}

int main(void) {
    start();
    printf("%-30s %-29s   %s\n", "", "the sender's call", "until the guest has counted it");
    printf("%-30s %9s %9s %7s   %9s %9s %7s\n", "medians of 1000, in turn", "message", "irqfd", "ratio", "message", "irqfd", "ratio");
    measure("to a guest that runs");
    *word(SLEEPS) = 1;
    measure("to a guest that sleeps");
    *word(SLEEPS) = 0;
    by_message();
    usleep(10000);
    measure_set_up();
    return 0;
}
