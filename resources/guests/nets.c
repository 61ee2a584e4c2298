/* An honest driver of network interfaces whose other side sends back what it gets (virtio 1.2, 2.7, 4.1.4 and 5.1): on each
 * one it sends `packets=N` (default 16) packets of `bytes=N` (default 1000), one after the other, and compares what comes
 * back. Prints `interface N packets P` for each. */
#include "device.h"
#include "runtime.h"
#include "virtio.h"

enum { ENTRIES = 16, RECEIVE = 0, SEND = 1, HEADER = 12, LARGEST = 1514, BUFFER = 2048 };
enum { AREA = 32 << 20, QUEUE_SIZE = 0x10000, AVAILABLE_AT = 0x2000, USED_AT = 0x3000, DATA_AT = 0x4000 };

struct interface {
    struct virtio virtio;
    u64 area;
    u16 made[2];
};

static u64 part(struct interface *net, u32 queue, u64 offset) { return net->area + QUEUE_SIZE * queue + offset; }

static void start(struct interface *net) {
    virtio_begin(&net->virtio, 0);
    for (u16 queue = RECEIVE; queue <= SEND; queue++) {
        for (u64 at = 0; at < DATA_AT; at += 8)
            write64(part(net, queue, at), 0);
        write16(part(net, queue, AVAILABLE_AT), 1); /* no interrupts */
        virtio_queue(&net->virtio, queue, ENTRIES, part(net, queue, 0), part(net, queue, AVAILABLE_AT), part(net, queue, USED_AT),
                     VIRTIO_NO_VECTOR);
    }
    virtio_ready(&net->virtio);
}

/* Makes the next buffer of a queue available; its address. */
static u64 make(struct interface *net, u32 queue, u32 length) {
    u16 slot = net->made[queue] % ENTRIES;
    u64 buffer = part(net, queue, DATA_AT + (u64)BUFFER * slot);
    struct descriptor *descriptors = (void *)part(net, queue, 0);
    descriptors[slot] = (struct descriptor){buffer, length, queue == RECEIVE ? DESCRIPTOR_WRITE : 0, 0};
    write16(part(net, queue, AVAILABLE_AT + 4 + 2 * slot), slot);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    write16(part(net, queue, AVAILABLE_AT + 2), ++net->made[queue]);
    write16(net->virtio.doorbell + (u64)net->virtio.step * queue, (u16)queue);
    return buffer;
}

static void wait(struct interface *net, u32 queue, u32 packet) {
    for (u32 tries = 0; read16(part(net, queue, USED_AT + 2)) != net->made[queue]; tries++) {
        require(tries < 100000, "packet %u %s", packet, queue == SEND ? "was not sent" : "did not come back");
        short_pause();
    }
}

void guest(void) {
    u32 packets = (u32)option("packets", 16), bytes = (u32)option("bytes", 1000), count = 0;
    require(bytes >= 8 && bytes <= LARGEST, "bytes are too many or too few");
    pci_start();
    walk();
    for (u32 i = 0; i < function_count; i++) {
        struct interface net = {.area = AREA + (u64)count * 2 * QUEUE_SIZE};
        if (!virtio_find(&functions[i], VIRTIO_NET, &net.virtio))
            continue;
        start(&net);
        for (u32 packet = 0; packet < packets; packet++) {
            u64 room = make(&net, RECEIVE, BUFFER), data = part(&net, SEND, DATA_AT + (u64)BUFFER * (packet % ENTRIES));
            for (u32 at = 0; at < HEADER + bytes; at++)
                write8(data + at, at < HEADER ? 0 : (u8)(at * 7 + packet));
            make(&net, SEND, HEADER + bytes);
            wait(&net, SEND, packet);
            wait(&net, RECEIVE, packet);
            u32 length = *(volatile u32 *)part(&net, RECEIVE, USED_AT + 8 + 8 * (packet % ENTRIES));
            require(length == HEADER + bytes, "packet %u has %u bytes", packet, length);
            for (u32 at = HEADER; at < length; at++)
                require(read8(room + at) == (u8)(at * 7 + packet), "packet %u came back as another", packet);
        }
        say("interface %u packets %u\n", count++, packets);
    }
    require(count, "no interface");
}
