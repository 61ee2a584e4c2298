/* Two consoles: a line that is typed on the serial port comes back there as `serial: LINE`, one that is typed on the virtio
 * console (virtio 1.2, 5.3) as `console: LINE` there. Prints `ready` on both. Never ends. */
#include "device.h"
#include "runtime.h"
#include "virtio.h"

enum { ENTRIES = 16, INPUT = 0, OUTPUT = 1, LINE = 256 };
enum { AREA = 32 << 20, QUEUE_SIZE = 0x10000, AVAILABLE_AT = 0x2000, USED_AT = 0x3000, DATA_AT = 0x4000 };

static struct virtio console;
static u16 made[2], taken;

static u64 part(u32 queue, u64 offset) { return AREA + QUEUE_SIZE * queue + offset; }

static u64 buffer(u32 queue, u16 number) { return part(queue, DATA_AT + LINE * (u64)(number % ENTRIES)); }

static void make(u32 queue, u32 length) {
    u16 slot = made[queue] % ENTRIES;
    struct descriptor *descriptors = (void *)part(queue, 0);
    descriptors[slot] = (struct descriptor){buffer(queue, slot), length, queue == INPUT ? DESCRIPTOR_WRITE : 0, 0};
    write16(part(queue, AVAILABLE_AT + 4 + 2 * slot), slot);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    write16(part(queue, AVAILABLE_AT + 2), ++made[queue]);
    write16(console.doorbell + (u64)console.step * queue, (u16)queue);
}

static void start(void) {
    virtio_begin(&console, 0);
    for (u16 queue = INPUT; queue <= OUTPUT; queue++) {
        for (u64 at = 0; at < DATA_AT; at += 8)
            write64(part(queue, at), 0);
        write16(part(queue, AVAILABLE_AT), 1); /* no interrupts */
        virtio_queue(&console, queue, ENTRIES, part(queue, 0), part(queue, AVAILABLE_AT), part(queue, USED_AT), VIRTIO_NO_VECTOR);
    }
    virtio_ready(&console);
    for (u32 i = 0; i < ENTRIES; i++)
        make(INPUT, LINE);
}

static void print_there(const char *text, const char *line) {
    u32 length = 0;
    volatile char *room = (volatile char *)buffer(OUTPUT, made[OUTPUT]);
    for (const char *c = text; *c; c++)
        room[length++] = *c;
    for (const char *c = line; *c && length < LINE - 1; c++)
        room[length++] = *c;
    room[length++] = '\n';
    make(OUTPUT, length);
    for (u32 tries = 0; read16(part(OUTPUT, USED_AT + 2)) != made[OUTPUT]; tries++) {
        require(tries < 1000000, "the console takes nothing");
        short_pause();
    }
}

/* Adds a character to a line; true when the line is complete. */
static bool add(char *line, u32 *length, char c) {
    if (c == '\n' || c == '\r') {
        line[*length] = 0;
        *length = 0;
        return true;
    }
    if (*length < LINE - 32)
        line[(*length)++] = c;
    return false;
}

void guest(void) {
    static char lines[2][LINE];
    u32 lengths[2] = {0, 0};
    pci_start();
    walk();
    for (u32 i = 0; i < function_count && !console.common; i++)
        if (!virtio_find(&functions[i], VIRTIO_CONSOLE, &console))
            console.common = 0;
    require(console.common, "no virtio console");
    start();
    say("ready\n");
    print_there("ready", "");
    for (;;) {
        int c = serial_read();
        if (c >= 0 && add(lines[0], &lengths[0], (char)c))
            say("serial: %s\n", lines[0]);
        while (read16(part(INPUT, USED_AT + 2)) != taken) {
            u64 entry = part(INPUT, USED_AT + 4 + 8 * (u64)(taken % ENTRIES));
            u32 id = *(volatile u32 *)entry, length = *(volatile u32 *)(entry + 4);
            for (u32 i = 0; i < length; i++)
                if (add(lines[1], &lengths[1], (char)read8(buffer(INPUT, (u16)id) + i)))
                    print_there("console: ", lines[1]);
            taken++;
            make(INPUT, LINE);
        }
        if (c < 0)
            short_pause();
    }
}
