/* Proves level-triggered interrupts in a guest: lets QEMU's `edu` device raise its pin again and again and waits for each.
 *
 *   edu_irq EDU UIO TIMES     an address such as 0000:03:00.0, its /dev/uioN (driver uio_pci_generic), how often
 *
 * uio_pci_generic masks the pin in the command register at each interrupt; this program ends the cause and unmasks it. It
 * prints `edu interrupts: N of N` and ends with 0 if every one arrived, with the value that caused it, and none beside them.
 *
 * Registers of edu (qemu: docs/specs/edu.rst): interrupt status 0x24, raise 0x60, acknowledge 0x64. */
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { STATUS = 0x24, RAISE = 0x60, ACKNOWLEDGE = 0x64, PIN_DISABLE = 1 << 10 };

static void give_up(const char *what) { perror(what); exit(2); }

static void unmask(int config) {
    uint16_t command;
    if (pread(config, &command, sizeof command, 4) != sizeof command) give_up("command register");
    command = (command | 0x2) & ~PIN_DISABLE;
    if (pwrite(config, &command, sizeof command, 4) != sizeof command) give_up("command register");
}

int main(int argc, char **argv) {
    char path[160];
    if (argc != 4) { fprintf(stderr, "usage: edu_irq EDU UIO TIMES\n"); return 2; }
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/config", argv[1]);
    int config = open(path, O_RDWR);
    if (config < 0) give_up(path);
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/resource0", argv[1]);
    int bar = open(path, O_RDWR | O_SYNC);
    if (bar < 0) give_up(path);
    volatile uint8_t *edu = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, bar, 0);
    if (edu == MAP_FAILED) give_up("mmap");
    int uio = open(argv[2], O_RDONLY);
    if (uio < 0) give_up(argv[2]);

    uint32_t times = (uint32_t)atoi(argv[3]), arrived = 0, first = 0, seen = 0;
    for (uint32_t i = 1; i <= times; i++) {
        struct pollfd waiting = {.fd = uio, .events = POLLIN};
        unmask(config);
        *(volatile uint32_t *)(edu + RAISE) = i;
        if (poll(&waiting, 1, 5000) != 1) { printf("interrupt %u does not arrive\n", i); break; }
        if (read(uio, &seen, sizeof seen) != sizeof seen) give_up("read");
        if (i == 1) first = seen;
        arrived += *(volatile uint32_t *)(edu + STATUS) == i && seen == first + i - 1;
        *(volatile uint32_t *)(edu + ACKNOWLEDGE) = i;
    }
    printf("edu interrupts: %u of %u\n", arrived, times);
    return arrived != times;
}
