/* The guest's side of sockets (virtio 1.2, 5.10). Refuses every connection until a line `l` comes on the serial port, then
 * accepts all and sends back what comes; after a line `h` it accepts, and takes nothing any more from whoever is connected.
 * Prints `ready`, then `listening` and `holding` when it follows. Never ends. */
#include "device.h"
#include "runtime.h"
#include "virtio.h"

enum { ENTRIES = 32, BUFFER = 4096, HEADER = 44, PEERS = 64, ROOM = 65536, AREA = 32 << 20, AREA_SIZE = 0x40000 };
enum { REQUEST = 1, RESPONSE = 2, RESET = 3, SHUTDOWN = 4, DATA = 5, CREDIT = 6, CREDIT_REQUEST = 7 };

struct packet {
    u64 from_cid, to_cid;
    u32 from_port, to_port, length;
    u16 type, operation;
    u32 flags, room, taken;
} __attribute__((packed));

static struct virtio sockets;
static struct stream receive = {&sockets, AREA, BUFFER, 0, ENTRIES, true, 0, 0};
static struct stream send = {&sockets, AREA + AREA_SIZE, BUFFER, 1, ENTRIES, false, 0, 0};
static struct stream events = {&sockets, AREA + 2 * AREA_SIZE, BUFFER, 2, ENTRIES, true, 0, 0};
static bool listening, holding;
static struct { u32 port, taken; } peers[PEERS];

static void start(void) {
    virtio_begin(&sockets, 0);
    stream_start(&receive);
    stream_start(&send);
    stream_start(&events);
    virtio_ready(&sockets);
    for (u32 i = 0; i < ENTRIES; i++)
        stream_make(&receive, BUFFER);
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
    struct packet *packet = (void *)stream_next(&send);
    *packet = (struct packet){to->to_cid, to->from_cid, to->to_port, to->from_port, length, to->type, operation, flags, ROOM,
                              operation == RESET ? 0 : *taken(to->from_port)};
    for (u32 i = 0; i < length; i++)
        write8((u64)(packet + 1) + i, read8((u64)(to + 1) + i));
    stream_make(&send, HEADER + length);
    require(stream_wait(&send, 1000000), "a packet is not sent");
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
    u32 looks = 0;
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
        u32 length;
        u64 packet = stream_take(&receive, &length);
        if (!packet) {
            rest(&looks);
            continue;
        }
        looks = 0;
        follow((const struct packet *)packet);
        stream_make(&receive, BUFFER);
    }
}
