/* A driver of virtio disks gone mad: queues, descriptors and rings with random content, resets while the disk is busy
 * (virtio 1.2, 2.7 and 4.1.4). `seed=N` (default 1), `rounds=N` (default 500). In the end each disk must serve an honest
 * request. What a disk may write to lies in RAM from SCRATCH on, or is no RAM at all, so that this program survives. */
#include "runtime.h"
#include "virtio.h"

enum { SCRATCH = 32 << 20, SCRATCH_SIZE = 64 << 20, QUEUE = 16 };

static u64 state;

/* xorshift64* (Vigna, 2016) */
static u64 random(void) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1d;
}

static u64 below(u64 limit) { return random() % limit; }

/* An address in the scratch area mostly, else one that is no RAM. */
static u64 somewhere(void) {
    switch (below(12)) {
    case 0:
        return ~0ull - below(64);
    case 1:
        return 0xe0000000 + below(1 << 20); /* ECAM */
    case 2:
        return 0xfee00000 + below(4096);
    case 3:
        return function_count ? functions[below(function_count)].bars[0].base + 0x10000000 : 0xa0000000;
    case 4:
        return random() | 1ull << 46;
    default:
        return SCRATCH + below(SCRATCH_SIZE - (1 << 20));
    }
}

static u32 some_length(void) {
    static const u32 lengths[] = {0, 1, 15, 16, 17, 512, 513, 4096, 65536, 1 << 20};
    switch (below(8)) {
    case 0: /* to the end of the address space or beyond: never into this program, which lies below */
        return 0xffffffff - (u32)below(16);
    case 1:
        return (u32)random();
    default:
        return lengths[below(sizeof lengths / sizeof *lengths)];
    }
}

static void start(struct virtio *disk, u64 descriptors, u64 available, u64 used) {
    virtio_begin(disk, 0);
    virtio_queue(disk, 0, QUEUE, descriptors, available, used, VIRTIO_NO_VECTOR);
    virtio_ready(disk);
}

static void fill_rings(u64 descriptors, u64 available) {
    for (u32 i = 0; i < QUEUE; i++) {
        struct descriptor *descriptor = (void *)(descriptors + 16 * i);
        *descriptor = (struct descriptor){somewhere(), some_length(), (u16)below(8), (u16)below(QUEUE + 1)};
        if (below(2)) { /* a header that asks for something the disk knows */
            descriptor->at = SCRATCH + (below(SCRATCH_SIZE - (1 << 20)) & ~15ull);
            descriptor->len = 16;
            descriptor->flags = DESCRIPTOR_NEXT;
            *(u64 *)descriptor->at = below(5) == 4 ? 8 : below(5);
            *(u64 *)(descriptor->at + 8) = below(4) ? below(64) : random();
        }
        if (descriptor->at < SCRATCH + SCRATCH_SIZE && descriptor->flags & DESCRIPTOR_WRITE)
            descriptor->len = descriptor->len > 1 << 20 && below(2) ? 1 << 20 : descriptor->len;
        write16(available + 4 + 2 * i, (u16)(below(8) ? below(QUEUE) : random()));
    }
    write16(available, (u16)below(2));
    write16(available + 2, (u16)(below(4) ? below(QUEUE + 1) : random()));
}

static void madness(struct virtio *disk) {
    u64 descriptors = SCRATCH + 4096 * below(64), available = SCRATCH + 4096 * below(64), used = SCRATCH + 4096 * below(64);
    start(disk, below(8) ? descriptors : somewhere(), below(8) ? available : somewhere(), below(8) ? used : somewhere());
    fill_rings(descriptors, available);
    for (u64 rings = 1 + below(3); rings--;) {
        write32(disk->doorbell, (u32)(below(8) ? 0 : random()));
        for (u64 i = below(4) * 100; i--;)
            short_pause();
        if (!below(3))
            fill_rings(descriptors, available);
        if (!below(8))
            config_write(disk->at, COMMAND, 2, (u16)(DECODE_MEMORY | below(2) * BUS_MASTER));
    }
    config_write(disk->at, COMMAND, 2, DECODE_MEMORY | BUS_MASTER);
}

static void honest_read(struct virtio *disk) {
    u64 descriptors = SCRATCH, available = SCRATCH + 0x1000, used = SCRATCH + 0x2000, data = SCRATCH + 0x3000;
    struct descriptor *chain = (void *)descriptors;
    volatile u8 *status = (void *)(data + 1024);
    volatile u16 *served = (void *)(used + 2);
    write8(disk->common + VIRTIO_STATUS, 0);
    for (u64 at = SCRATCH; at < SCRATCH + 0x4000; at += 8)
        write64(at, 0);
    chain[0] = (struct descriptor){data, 16, DESCRIPTOR_NEXT, 1};
    chain[1] = (struct descriptor){data + 512, 512, DESCRIPTOR_NEXT | DESCRIPTOR_WRITE, 2};
    chain[2] = (struct descriptor){data + 1024, 1, DESCRIPTOR_WRITE, 0};
    *status = 0xff;
    start(disk, descriptors, available, used);
    write16(available + 2, 1);
    write32(disk->doorbell, 0);
    for (u32 i = 0; !*served && i < 1000000; i++)
        short_pause();
    require(*served == 1, "an honest request is not served");
    require(*status == 0, "an honest request ends with status %u", *status);
}

void guest(void) {
    u64 seed = option("seed", 1), rounds = option("rounds", 500), disks = 0;
    state = seed * 0x9e3779b97f4a7c15 + 1;
    pci_start();
    walk();
    for (u32 i = 0; i < function_count; i++) {
        struct virtio disk;
        if (!virtio_find(&functions[i], VIRTIO_DISK, &disk))
            continue;
        disks++;
        honest_read(&disk);
        for (u64 round = 0; round < rounds; round++)
            madness(&disk);
        honest_read(&disk);
    }
    require(disks, "no disk");
    say("seed %lu disks %lu\n", seed, disks);
}
