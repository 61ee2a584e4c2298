/* An honest driver of virtio disks (virtio 1.2, 2.7, 4.1.4 and 5.2): on each disk it writes a pattern by `requests=N`
 * (default 16) requests of `bytes=N` (default 4096) and reads it back, `batch=N` (default 1) with each ring of the doorbell.
 * `reads=N`, `writes=N`: so many requests only, of any data, between `begin` and `end` on the serial port.
 * `wait=interrupt`: sleeps until the device's interrupt in place of polling.
 * `ring=window`: rings through configuration space.
 * `moves=N`: so many times BARs of the first two disks change places, decoding off or on, while other processors, if there
 * are any, ring wherever the disks are or were.
 * Prints `disk N requests R interrupts I` for each disk. */
#include "device.h"
#include "runtime.h"
#include "virtio.h"

enum { ENTRIES = 256, BATCH_MAX = ENTRIES / 3, DISKS_MAX = 8 };
enum { AREA = 32 << 20, AREA_SIZE = 8 << 20, AVAILABLE_AT = 0x2000, USED_AT = 0x3000, HEADERS_AT = 0x5000, DATA_AT = 0x10000 };
enum { READ = 0, WRITE = 1 };

struct disk {
    struct function *function;
    struct virtio virtio;
    u64 area; /* queue and buffers */
    u16 made;
    u32 vector, served;
};

static struct disk disks[DISKS_MAX];
static u32 disk_count, bytes, batch;
static bool sleeps, by_window, fills;
static volatile u64 doorbells[2];
static volatile u32 started, stop, stopped;

/* What the disk holds at a byte offset, a multiple of 8. */
static u64 pattern(u64 offset) { return (offset + 8) * 0x9e3779b97f4a7c15; }

static void start(struct disk *disk) {
    virtio_begin(&disk->virtio, 0);
    for (u64 at = disk->area; at < disk->area + DATA_AT; at += 8)
        write64(at, 0);
    u16 vector = VIRTIO_NO_VECTOR;
    if (sleeps) {
        msix_fill(disk->function, 1, (u8)disk->vector);
        msix_control(disk->function->at, MSIX_ON);
        vector = 1;
    }
    virtio_queue(&disk->virtio, 0, ENTRIES, disk->area, disk->area + AVAILABLE_AT, disk->area + USED_AT, vector);
    if (!sleeps)
        write16(disk->area + AVAILABLE_AT, 1); /* no interrupts */
    virtio_ready(&disk->virtio);
    disk->made = 0;
}

static void ring(struct disk *disk) {
    if (!by_window) {
        write16(disk->virtio.doorbell, 0);
        return;
    }
    place at = disk->virtio.at;
    u32 window = disk->virtio.window;
    config_write(at, window + 4, 1, 0);
    config_write(at, window + 8, 4, (u32)(disk->virtio.doorbell - disk->function->bars[0].base));
    config_write(at, window + 12, 4, 2);
    config_write(at, window + 16, 2, 0);
}

/* Makes request number `slot` of a batch available. */
static void make(struct disk *disk, u32 slot, u32 type, u64 offset) {
    struct descriptor *chain = (void *)(disk->area + 16 * 3 * slot);
    u64 header = disk->area + HEADERS_AT + 32 * slot, data = disk->area + DATA_AT + (u64)bytes * slot;
    write64(header, type);
    write64(header + 8, offset / 512);
    write8(header + 16, 0xff);
    if (type == WRITE && fills)
        for (u64 i = 0; i < bytes; i += 8)
            write64(data + i, pattern(offset + i));
    u16 first = (u16)(3 * slot), way = type == READ ? DESCRIPTOR_WRITE : 0;
    chain[0] = (struct descriptor){header, 16, DESCRIPTOR_NEXT, (u16)(first + 1)};
    chain[1] = (struct descriptor){data, bytes, DESCRIPTOR_NEXT | way, (u16)(first + 2)};
    chain[2] = (struct descriptor){header + 16, 1, DESCRIPTOR_WRITE, 0};
    write16(disk->area + AVAILABLE_AT + 4 + 2 * (disk->made % ENTRIES), first);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    write16(disk->area + AVAILABLE_AT + 2, ++disk->made);
}

static bool is_done(struct disk *disk) { return read16(disk->area + USED_AT + 2) == disk->made; }

static void wait(struct disk *disk, const char *what) {
    for (u32 tries = 0; !is_done(disk); tries++) {
        require(tries < 20000000, "disk %u: %s: a request is not served", (u32)(disk - disks), what);
        if (sleeps) {
            interrupts_off();
            if (!is_done(disk))
                __asm__ volatile("sti; hlt" ::: "memory");
            interrupts_on();
        } else if (tries % 1024 == 1023) {
            short_pause();
        } else {
            __builtin_ia32_pause();
        }
    }
}

/* Carries out requests `from` to `to` of a kind and compares what is read, if it is known. */
static void transfer(struct disk *disk, u32 type, u64 from, u64 to, bool known, const char *what) {
    while (from < to) {
        u32 count = (u32)(to - from < batch ? to - from : batch);
        for (u32 slot = 0; slot < count; slot++)
            make(disk, slot, type, (from + slot) * bytes);
        ring(disk);
        wait(disk, what);
        for (u32 slot = 0; slot < count; slot++) {
            u64 header = disk->area + HEADERS_AT + 32 * slot, data = disk->area + DATA_AT + (u64)bytes * slot;
            require(read8(header + 16) == 0, "disk %u: %s: status %u", (u32)(disk - disks), what, read8(header + 16));
            for (u64 i = 0; type == READ && known && i < bytes; i += 512)
                require(read64(data + i) == pattern((from + slot) * bytes + i), "disk %u: %s: wrong data", (u32)(disk - disks), what);
        }
        disk->served += count;
        from += count;
    }
}

/* Others ring at both places, whoever is there, until they are told to stop. */
void processor_started(void) {
    load_idt();
    __atomic_fetch_add(&started, 1, __ATOMIC_SEQ_CST);
    while (!stop) {
        write16(doorbells[0], 0);
        write32(doorbells[1], 0);
    }
    __atomic_fetch_add(&stopped, 1, __ATOMIC_SEQ_CST);
}

static void place_disk(struct disk *disk, u64 base) {
    u64 old = disk->function->bars[0].base;
    config_write(disk->virtio.at, BAR0, 4, (u32)base);
    disk->virtio.common += base - old;
    disk->virtio.doorbell += base - old;
    disk->function->bars[0].base = base;
}

static void decode(struct disk *disk, bool on) {
    config_write(disk->virtio.at, COMMAND, 2, BUS_MASTER | (on ? DECODE_MEMORY : 0));
}

static void change_places(u64 moves) {
    struct disk *a = &disks[0], *b = &disks[1];
    doorbells[0] = a->virtio.doorbell;
    doorbells[1] = b->virtio.doorbell;
    u32 others = (u32)option("cpus", 1) - 1;
    if (others)
        start_others(&started, others);
    require(started == others, "%u of %u other processors started", started, others);
    for (u64 move = 0; move < moves; move++) {
        bool off = move % 2;
        if (off) {
            decode(a, false);
            ring(a); /* nobody is there, or who was there: both are harmless */
            decode(b, false);
        }
        u64 base = a->function->bars[0].base;
        place_disk(a, b->function->bars[0].base);
        place_disk(b, base);
        if (off) {
            decode(b, true);
            decode(a, true);
        }
        transfer(a, READ, 0, batch, true, "moved");
        transfer(b, READ, 0, batch, true, "moved");
    }
    stop = 1;
    for (u32 i = 0; i < 1000000 && stopped < others; i++)
        short_pause();
    require(stopped == others, "%u of %u other processors stopped", stopped, others);
}

void guest(void) {
    char how[16];
    bytes = (u32)option("bytes", 4096);
    batch = (u32)option("batch", 1);
    sleeps = option_text("wait", how, sizeof how) && text_equal(how, "interrupt");
    by_window = option_text("ring", how, sizeof how) && text_equal(how, "window");
    fills = !option("writes", 0);
    require(batch >= 1 && batch <= BATCH_MAX && bytes % 512 == 0 && (u64)bytes * batch <= AREA_SIZE - DATA_AT, "batch or bytes are too large");
    pci_start();
    walk();
    interrupts_start();
    apic_start();
    interrupts_on();
    for (u32 i = 0; i < function_count && disk_count < DISKS_MAX; i++) {
        struct disk *disk = &disks[disk_count];
        if (!virtio_find(&functions[i], VIRTIO_DISK, &disk->virtio))
            continue;
        disk->function = &functions[i];
        disk->area = AREA + (u64)AREA_SIZE * disk_count;
        disk->vector = FIRST_VECTOR + disk_count++;
        start(disk);
    }
    require(disk_count, "no disk");
    u64 requests = option("requests", 16), reads = option("reads", 0), writes = option("writes", 0), moves = option("moves", 0);
    for (u32 n = 0; n < disk_count; n++) {
        if (reads || writes) {
            say("begin\n");
            for (u64 done = 0; done < reads + writes; done += requests)
                transfer(&disks[n], reads ? READ : WRITE, 0, requests < reads + writes - done ? requests : reads + writes - done, false, "any");
            say("end\n");
            continue;
        }
        transfer(&disks[n], WRITE, 0, requests, true, "write");
        transfer(&disks[n], READ, 0, requests, true, "read back");
    }
    if (moves) {
        require(disk_count >= 2, "there are no two disks to change places");
        change_places(moves);
    }
    for (u32 n = 0; n < disk_count; n++)
        say("disk %u requests %u interrupts %u\n", n, disks[n].served, interrupt_count[disks[n].vector]);
}
