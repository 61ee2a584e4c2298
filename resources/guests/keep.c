/* Keeps everything busy and in order, for pauses and snapshots: counts rounds in RAM; in each round every virtio disk writes
 * and reads a sector, every source of random numbers fills a buffer, every stub with a copy engine copies. A local timer
 * ticks. Typed `c` prints `count ROUNDS ticks TICKS interrupts N disks D random R stubs S`; `q` ends with PASS. Anything out
 * of order ends with FAIL: a count that went back, time that went back, data that is not what was written, a stub that forgot
 * its scratch. */
#include "device.h"
#include "runtime.h"
#include "virtio.h"

enum { SCRATCH = 32 << 20, AREA = 64 << 10, QUEUE = 16, DEVICES = 8, TICK = 0x40 };
enum { APIC_TIMER = 0x320, APIC_INITIAL = 0x380, APIC_DIVIDE = 0x3e0, PERIODIC = 1 << 17 };

struct lane { struct virtio device; u64 area; u16 next; };

static struct lane disks[DEVICES], sources[DEVICES];
static struct function *stubs[DEVICES];
static u32 disk_count, source_count, stub_count;
static volatile u64 rounds;

static u64 time_stamp(void) {
    u32 low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return (u64)high << 32 | low;
}

/* Rings at the start of an area, data from 0x3000 on. */
static void open_lane(struct lane *lane, struct virtio device, struct function *function) {
    static u32 opened;
    u64 area = SCRATCH + (u64)AREA * opened;
    *lane = (struct lane){device, area, 0};
    for (u64 at = area; at < area + AREA; at += 8) /* a reset leaves memory as it was */
        write64(at, 0);
    msix_fill(function, 0, (u8)(FIRST_VECTOR + opened++));
    msix_control(device.at, MSIX_ON);
    virtio_begin(&device, 0);
    virtio_queue(&device, 0, QUEUE, area, area + 0x1000, area + 0x2000, 0);
    virtio_ready(&device);
}

/* Offers the chain of `parts` descriptors from the first one on, and waits until it is used. */
static void exchange(struct lane *lane, const char *what) {
    volatile u16 *used = (void *)(lane->area + 0x2002);
    write16(lane->area + 0x1004 + 2 * (lane->next % QUEUE), 0);
    lane->next++;
    write16(lane->area + 0x1002, lane->next);
    write32(lane->device.doorbell, 0);
    for (u32 i = 0; *used != lane->next && i < 20000000; i++)
        __asm__ volatile("pause");
    require(*used == lane->next, "%s: request %u is not served", what, lane->next);
}

static void use_disk(struct lane *lane, u32 type, u64 sector) {
    struct descriptor *chain = (void *)lane->area;
    u64 data = lane->area + 0x3000;
    volatile u8 *status = (void *)(data + 1024);
    chain[0] = (struct descriptor){data, 16, DESCRIPTOR_NEXT, 1};
    chain[1] = (struct descriptor){data + 512, 512, (u16)(DESCRIPTOR_NEXT | (type ? 0 : DESCRIPTOR_WRITE)), 2};
    chain[2] = (struct descriptor){data + 1024, 1, DESCRIPTOR_WRITE, 0};
    write64(data, type);
    write64(data + 8, sector);
    *status = 0xff;
    exchange(lane, "disk");
    require(*status == 0, "a request ends with status %u", *status);
}

static void round_of_disk(struct lane *lane, u64 round) {
    u64 data = lane->area + 0x3000 + 512, sector = round % 16;
    for (u32 i = 0; i < 512; i += 8)
        write64(data + i, round ^ i);
    use_disk(lane, 1, sector);
    for (u32 i = 0; i < 512; i += 8)
        write64(data + i, 0);
    use_disk(lane, 0, sector);
    for (u32 i = 0; i < 512; i += 8)
        require(read64(data + i) == (round ^ i), "sector %lu does not hold what was written", sector);
}

static void round_of_source(struct lane *lane) {
    struct descriptor *chain = (void *)lane->area;
    chain[0] = (struct descriptor){lane->area + 0x3000, 256, DESCRIPTOR_WRITE, 0};
    exchange(lane, "random numbers");
}

static void round_of_stub(struct function *function, u64 round) {
    u64 from = SCRATCH + (u64)AREA * 2 * DEVICES, to = from + 0x1000;
    write64(from, round);
    write64(to, 0);
    require(read32(stub_address(function, STUB_SCRATCH)) == (u32)(round - 1), "the stub forgot what it was told");
    write32(stub_address(function, STUB_SCRATCH), (u32)round);
    u32 end = stub_copy(function, from, to, 4096, 0);
    require(end & STUB_DONE, "a copy ends with %x", end);
    require(read64(to) == round, "a copy is no copy");
}

void guest(void) {
    pci_start();
    walk();
    interrupts_start();
    apic_start();
    interrupts_on();
    for (u32 i = 0; i < function_count; i++) {
        struct virtio device;
        if (disk_count < DEVICES && virtio_find(&functions[i], VIRTIO_DISK, &device))
            open_lane(&disks[disk_count++], device, &functions[i]);
        else if (source_count < DEVICES && virtio_find(&functions[i], VIRTIO_RANDOM, &device))
            open_lane(&sources[source_count++], device, &functions[i]);
    }
    for (u32 i = 0; stub_count < DEVICES && stub(i); i++) {
        stubs[stub_count++] = stub(i);
        config_write(stub(i)->at, COMMAND, 2, DECODE_MEMORY | BUS_MASTER);
    }
    apic_write(APIC_DIVIDE, 3);
    apic_write(APIC_TIMER, PERIODIC | TICK);
    apic_write(APIC_INITIAL, 1000000);
    say("ready\n");
    u64 before = 0, stamp = 0;
    for (;;) {
        u64 round = ++rounds, now = time_stamp();
        require(round == before + 1, "round %lu follows %lu", round, before);
        require(now > stamp, "time went back from %lu to %lu", stamp, now);
        before = round;
        stamp = now;
        for (u32 i = 0; i < disk_count; i++)
            round_of_disk(&disks[i], round);
        for (u32 i = 0; i < source_count; i++)
            round_of_source(&sources[i]);
        for (u32 i = 0; i < stub_count; i++)
            round_of_stub(stubs[i], round);
        u32 interrupts = 0;
        for (u32 i = 0; i < disk_count + source_count; i++)
            interrupts += interrupt_count[FIRST_VECTOR + i];
        switch (serial_read()) {
        case 'c':
            say("count %lu ticks %u interrupts %u disks %u random %u stubs %u\n", round, interrupt_count[TICK], interrupts,
                disk_count, source_count, stub_count);
            break;
        case 'q':
            pass();
        }
    }
}
