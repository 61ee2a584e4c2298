/* A driver of virtio memory devices (virtio 1.2 5.15): plugs blocks until it has what it is to have, writes their ends, reads
 * them back, and gives blocks back from the top when it is to have less. It looks when the device interrupts. Prints
 * `region BASE size S block B node N` for each device, `ready`, then `has PLUGGED` for each change; ends at a line of input.
 * `reset=1`: a line resets the machine. */
#include "device.h"
#include "pci.h"
#include "runtime.h"
#include "virtio.h"

enum { RINGS = 32 << 20, QUEUE = 4, VECTOR = 0x31, DEVICES = 4 };
enum { NODES = 1, UNPLUGGED_IS_LEFT_ALONE = 2 }; /* features */
enum { BLOCK = 0, NODE = 8, ADDRESS = 16, REGION = 24, USABLE = 32, PLUGGED = 40, REQUESTED = 48 };
enum { PLUG, UNPLUG, UNPLUG_ALL, STATE };
enum { ACK, NACK, BUSY, ERROR };

struct request { u16 type, padding[3]; u64 at; u16 count, more[3]; };
struct response { u16 type, padding[3], state; };
struct memory { struct virtio device; u64 rings, block; u16 sent; };

static struct memory devices[DEVICES];
static u32 count;

static u64 field(struct memory *memory, u32 offset) {
    u64 at = memory->device.config + offset;
    return (u64)read32(at + 4) << 32 | read32(at);
}

/* Sends a request and waits for its answer. */
static struct response ask(struct memory *memory, u16 type, u64 at, u16 blocks) {
    u64 descriptors = memory->rings, available = memory->rings + 0x1000, used = memory->rings + 0x2000;
    struct request *request = (void *)(memory->rings + 0x3000);
    struct response *response = (void *)(memory->rings + 0x3800);
    struct descriptor *chain = (void *)descriptors;
    *request = (struct request){.type = type, .at = at, .count = blocks};
    *response = (struct response){.type = 0xffff};
    chain[0] = (struct descriptor){(u64)request, sizeof *request, DESCRIPTOR_NEXT, 1};
    chain[1] = (struct descriptor){(u64)response, sizeof *response, DESCRIPTOR_WRITE, 0};
    write16(available + 4 + 2 * (memory->sent % QUEUE), 0);
    memory->sent++;
    write16(available + 2, memory->sent);
    write32(memory->device.doorbell, 0);
    volatile u16 *served = (void *)(used + 2);
    for (u32 i = 0; *served != memory->sent && i < 10000000; i++)
        short_pause();
    require(*served == memory->sent, "a request is not served");
    return *response;
}

static void expect(struct memory *memory, u16 type, u64 at, u16 blocks, u16 answer) {
    u16 got = ask(memory, type, at, blocks).type;
    require(got == answer, "request %u of %u blocks at %lx: answer %u, not %u", type, blocks, at, got, answer);
}

static void find(struct function *function) {
    struct virtio device;
    if (count == DEVICES || !virtio_find(function, VIRTIO_MEMORY, &device))
        return;
    require(device.config, "a memory device lacks a structure");
    struct memory *memory = &devices[count];
    *memory = (struct memory){.device = device, .rings = RINGS + count * 0x10000};
    count++;
    for (u64 word = memory->rings; word < memory->rings + 0x4000; word += 8)
        write64(word, 0);
    msix_fill(function, 0, VECTOR);
    msix_control(function->at, MSIX_ON);
    virtio_begin(&device, NODES | UNPLUGGED_IS_LEFT_ALONE);
    write16(device.common + VIRTIO_CONFIG_VECTOR, 0);
    virtio_queue(&device, 0, QUEUE, memory->rings, memory->rings + 0x1000, memory->rings + 0x2000, VIRTIO_NO_VECTOR);
    virtio_ready(&device);
    memory->block = field(memory, BLOCK);
    say("region %lx size %lx block %lx node %u\n", field(memory, ADDRESS), field(memory, REGION), memory->block,
        read16(device.config + NODE));
    require(field(memory, PLUGGED) == 0, "blocks are plugged that nobody plugged");
}

static void use(u64 at, u64 size) {
    u64 ends[2] = {at, at + size - 8};
    for (u32 i = 0; i < 2; i++) {
        reach(ends[i], 8);
        require(read64(ends[i]) == 0, "new memory at %lx holds %lx", ends[i], read64(ends[i]));
        write64(ends[i], ends[i] * 0x9e3779b97f4a7c15);
        require(read64(ends[i]) == ends[i] * 0x9e3779b97f4a7c15, "memory at %lx does not keep its value", ends[i]);
    }
}

static void follow(struct memory *memory) {
    u64 base = field(memory, ADDRESS), has = field(memory, PLUGGED), wanted = field(memory, REQUESTED);
    require(wanted <= field(memory, USABLE), "more is wanted than can be used");
    if (has == wanted)
        return;
    while (has < wanted) {
        u64 blocks = (wanted - has) / memory->block;
        blocks = blocks > 64 ? 64 : blocks;
        expect(memory, PLUG, base + has, (u16)blocks, ACK);
        expect(memory, PLUG, base + has, 1, ERROR); /* it is plugged */
        use(base + has, blocks * memory->block);
        has += blocks * memory->block;
    }
    while (has > wanted) {
        has -= memory->block;
        expect(memory, UNPLUG, base + has, 1, ACK);
        expect(memory, UNPLUG, base + has, 1, ERROR); /* it is gone */
    }
    require(field(memory, PLUGGED) == has, "the device counts %lx and not %lx", field(memory, PLUGGED), has);
    struct response state = ask(memory, STATE, base, 1);
    require(state.type == ACK && state.state == !has, "the first block's state is %u", state.state);
    expect(memory, STATE, base + field(memory, REGION), 1, ERROR);
    say("has %lx\n", has);
}

void guest(void) {
    interrupts_start();
    apic_start();
    interrupts_on();
    pci_start();
    walk();
    for (u32 i = 0; i < function_count; i++)
        find(&functions[i]);
    require(count, "no memory device");
    u32 seen = interrupt_count[VECTOR]; /* what comes from here on is looked at once more */
    for (u32 i = 0; i < count; i++)
        follow(&devices[i]);
    say("ready\n");
    u32 looks = 0;
    while (serial_read() < 0) {
        if (seen == interrupt_count[VECTOR]) {
            rest(&looks);
            continue;
        }
        looks = 0;
        seen = interrupt_count[VECTOR];
        for (u32 i = 0; i < count; i++)
            follow(&devices[i]);
    }
    if (option("reset", 0))
        out8(0xcf9, 6);
}
