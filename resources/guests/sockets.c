/* The guest's side of sockets (virtio 1.2, 5.10). Refuses every connection until a line `l` comes on the serial port, then
 * accepts all and sends back what comes; after a line `h` it accepts, and takes nothing any more from whoever is connected.
 * Prints `ready`, then `listening` and `holding` when it follows. Never ends. */
#include "device.h"
#include "runtime.h"
#include "virtio.h"

enum { ENTRIES = 32, RECEIVE = 0, SEND = 1, EVENTS = 2, BUFFER = 4096, HEADER = 44, PEERS = 64, ROOM = 65536 };
enum { AREA = 32 << 20, QUEUE_SIZE = 0x40000, AVAILABLE_AT = 0x2000, USED_AT = 0x3000, DATA_AT = 0x4000 };
enum { REQUEST = 1, RESPONSE = 2, RESET = 3, SHUTDOWN = 4, DATA = 5, CREDIT = 6, CREDIT_REQUEST = 7 };

struct packet {
    u64 from_cid, to_cid;
    u32 from_port, to_port, length;
    u16 type, operation;
    u32 flags, room, taken;
} __attribute__((packed));

static struct virtio sockets;
static u16 made[3], used;
static bool listening, holding;
static struct { u32 port, taken; } peers[PEERS];

static u64 part(u32 queue, u64 offset) { return AREA + QUEUE_SIZE * queue + offset; }

static u64 buffer(u32 queue, u16 number) { return part(queue, DATA_AT + BUFFER * (u64)(number % ENTRIES)); }

static void make(u32 queue, u32 length) {
    u16 slot = made[queue] % ENTRIES;
    struct descriptor *descriptors = (void *)part(queue, 0);
    descriptors[slot] = (struct descriptor){buffer(queue, slot), length, queue == SEND ? 0 : DESCRIPTOR_WRITE, 0};
    write16(part(queue, AVAILABLE_AT + 4 + 2 * slot), slot);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    write16(part(queue, AVAILABLE_AT + 2), ++made[queue]);
    write16(sockets.doorbell + (u64)sockets.step * queue, (u16)queue);
}

static void start(void) {
    virtio_begin(&sockets, 0);
    for (u16 queue = RECEIVE; queue <= EVENTS; queue++) {
        for (u64 at = 0; at < DATA_AT; at += 8)
            write64(part(queue, at), 0);
        write16(part(queue, AVAILABLE_AT), 1); /* no interrupts */
        virtio_queue(&sockets, queue, ENTRIES, part(queue, 0), part(queue, AVAILABLE_AT), part(queue, USED_AT), VIRTIO_NO_VECTOR);
    }
    virtio_ready(&sockets);
    for (u32 i = 0; i < ENTRIES; i++)
        make(RECEIVE, BUFFER);
}

/* What has been taken from a peer so far; a free place for a new one. */
static u32 *taken(u32 port) {
    u32 free = PEERS;
    for (u32 i = 0; i < PEERS; i++) {
        if (peers[i].port == port)
            return &peers[i].taken;
        if (!peers[i].port && free == PEERS)
            free = i;
    }
    require(free < PEERS, "too many peers");
    peers[free].port = port;
    peers[free].taken = 0;
    return &peers[free].taken;
}

static void forget(u32 port) {
    for (u32 i = 0; i < PEERS; i++)
        if (peers[i].port == port)
            peers[i].port = 0;
}

/* Answers a packet, with `length` bytes of what came with it. */
static void answer(const struct packet *to, u16 operation, u32 length, u32 flags) {
    struct packet *packet = (void *)buffer(SEND, made[SEND]);
    *packet = (struct packet){to->to_cid, to->from_cid, to->to_port, to->from_port, length, to->type, operation, flags, ROOM,
                              operation == RESET ? 0 : *taken(to->from_port)};
    for (u32 i = 0; i < length; i++)
        write8((u64)(packet + 1) + i, read8((u64)(to + 1) + i));
    make(SEND, HEADER + length);
    for (u32 tries = 0; read16(part(SEND, USED_AT + 2)) != made[SEND]; tries++) {
        require(tries < 1000000, "a packet is not sent");
        short_pause();
    }
}

static void follow(const struct packet *packet) {
    switch (packet->operation) {
    case REQUEST:
        answer(packet, listening ? RESPONSE : RESET, 0, 0);
        break;
    case DATA:
        if (holding)
            break;
        *taken(packet->from_port) += packet->length;
        answer(packet, DATA, packet->length, 0);
        break;
    case CREDIT_REQUEST:
        answer(packet, CREDIT, 0, 0);
        break;
    case SHUTDOWN:
        forget(packet->from_port);
        answer(packet, RESET, 0, 0);
        break;
    case RESET:
        forget(packet->from_port);
        break;
    default:
        break;
    }
}

void guest(void) {
    pci_start();
    walk();
    bool found = false;
    for (u32 i = 0; i < function_count && !found; i++)
        found = virtio_find(&functions[i], VIRTIO_SOCKETS, &sockets);
    require(found, "no sockets");
    start();
    say("ready\n");
    for (;;) {
        int c = serial_read();
        if (c == 'l') {
            listening = true;
            say("listening\n");
        }
        if (c == 'h') {
            holding = true;
            say("holding\n");
        }
        if (read16(part(RECEIVE, USED_AT + 2)) == used) {
            short_pause();
            continue;
        }
        u32 id = *(volatile u32 *)part(RECEIVE, USED_AT + 4 + 8 * (u64)(used % ENTRIES));
        used++;
        follow((const struct packet *)buffer(RECEIVE, (u16)id));
        make(RECEIVE, BUFFER);
    }
}
