/* Proves peer-to-peer DMA in a guest: QEMU's `edu` device copies a block inside the BAR of another device.
 *
 *   edu_p2p EDU PEER BAR      addresses such as 0000:03:00.0, and the number of the peer's BAR
 *
 * The CPU puts a pattern into the peer's BAR; edu's engine takes it into its own buffer and writes it back to another place of
 * the same BAR. It prints `P2P OK` and ends with 0 if the CPU finds the pattern there: that needs the peer's BAR in edu's DMA
 * domain, at the address that the guest knows. If a driver holds the peer, the kernel needs iomem=relaxed.
 *
 * Registers of edu (qemu: docs/specs/edu.rst): DMA source 0x80, destination 0x88, count 0x90, command 0x98 with bit 0 start and
 * busy, bit 1 direction (set: from the device's buffer at 0x40000 to memory). */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SOURCE = 0x80, DESTINATION = 0x88, COUNT = 0x90, COMMAND = 0x98, BUFFER = 0x40000 };
enum { START = 1, TO_MEMORY = 2 };
enum { WORDS = 64, COPY_AT = 2048, WINDOW = 4096 };

static void give_up(const char *what) { perror(what); exit(2); }

static int open_file_of(const char *function, const char *name) {
    char path[160];
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/%s", function, name);
    int file = open(path, O_RDWR | O_SYNC);
    if (file < 0) give_up(path);
    return file;
}

/* Memory decode and bus mastering on. */
static void enable(const char *function) {
    int file = open_file_of(function, "config");
    uint16_t command;
    if (pread(file, &command, sizeof command, 4) != sizeof command) give_up("command register");
    command |= 0x6;
    if (pwrite(file, &command, sizeof command, 4) != sizeof command) give_up("command register");
    close(file);
}

/* The bus address of a BAR, from its registers. */
static uint64_t bar_base(const char *function, int bar) {
    int file = open_file_of(function, "config");
    uint32_t low, high = 0;
    if (pread(file, &low, sizeof low, 0x10 + bar * 4) != sizeof low) give_up("BAR");
    if ((low & 0x6) == 0x4 && pread(file, &high, sizeof high, 0x14 + bar * 4) != sizeof high) give_up("BAR");
    close(file);
    return (uint64_t)high << 32 | (low & ~0xfu);
}

static volatile void *map_bar(const char *function, int bar, size_t length) {
    char name[16];
    snprintf(name, sizeof name, "resource%d", bar);
    int file = open_file_of(function, name);
    void *map = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map == MAP_FAILED) give_up(name);
    close(file);
    return map;
}

static void copy(volatile uint8_t *edu, uint64_t from, uint64_t to, uint32_t direction) {
    *(volatile uint64_t *)(edu + SOURCE) = from;
    *(volatile uint64_t *)(edu + DESTINATION) = to;
    *(volatile uint64_t *)(edu + COUNT) = WORDS * sizeof(uint32_t);
    *(volatile uint64_t *)(edu + COMMAND) = START | direction;
    for (int wait = 0; wait < 500; wait++) {
        if (!(*(volatile uint64_t *)(edu + COMMAND) & START)) return;
        usleep(10000);
    }
    fprintf(stderr, "edu stays busy\n");
    exit(2);
}

int main(int argc, char **argv) {
    if (argc != 4) { fprintf(stderr, "usage: edu_p2p EDU PEER BAR\n"); return 2; }
    const char *engine = argv[1], *peer = argv[2];
    int bar = atoi(argv[3]), wrong = 0;
    enable(engine);
    enable(peer);
    volatile uint8_t *edu = map_bar(engine, 0, 1 << 20);
    volatile uint32_t *target = map_bar(peer, bar, WINDOW);
    uint64_t base = bar_base(peer, bar);

    for (uint32_t i = 0; i < WORDS; i++) {
        target[i] = 0x5eed0000u | i;
        target[COPY_AT / 4 + i] = 0;
    }
    copy(edu, base, BUFFER, 0);
    copy(edu, BUFFER, base + COPY_AT, TO_MEMORY);
    for (uint32_t i = 0; i < WORDS; i++) wrong += target[COPY_AT / 4 + i] != (0x5eed0000u | i);

    printf("edu %s copied %zu bytes inside BAR%d of %s at %#llx: %d words wrong\n", engine, WORDS * sizeof(uint32_t), bar, peer,
           (unsigned long long)base, wrong);
    puts(wrong ? "P2P FAILED" : "P2P OK");
    return wrong != 0;
}
