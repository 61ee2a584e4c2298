/* A driver of virtio memory devices (virtio 1.2 5.15): plugs blocks until it has what it is to have, writes their ends, reads
 * them back, and gives blocks back from the top when it is to have less. It looks when the device interrupts. Prints
 * `region BASE size S block B node N` for each device, `ready`, then `has PLUGGED` for each change; ends at a line of input.
 * `reset=1`: a line resets the machine. */
#include "device.h"
#include "pci.h"
#include "runtime.h"

enum { RINGS = 32 << 20, QUEUE = 4, VECTOR = 0x31, DEVICES = 4 };
enum { FEATURE_SELECT = 0x08, FEATURE = 0x0c, CONFIG_VECTOR = 0x10, STATUS = 0x14, QUEUE_SELECT = 0x16, SIZE = 0x18,
       ENABLE = 0x1c, DESCRIPTORS = 0x20, AVAILABLE = 0x28, USED = 0x30 };
enum { BLOCK = 0, NODE = 8, ADDRESS = 16, REGION = 24, USABLE = 32, PLUGGED = 40, REQUESTED = 48 };
enum { PLUG, UNPLUG, UNPLUG_ALL, STATE };
enum { ACK, NACK, BUSY, ERROR };
enum { NEXT = 1, WRITE = 2 };

struct descriptor { u64 at; u32 len; u16 flags, next; };
struct request { u16 type, padding[3]; u64 at; u16 count, more[3]; };
struct response { u16 type, padding[3], state; };
struct memory { place at; u64 common, doorbell, config, rings, block; u16 sent; };

static struct memory devices[DEVICES];
static u32 count;

static u64 field(struct memory *memory, u32 offset) {
    return (u64)read32(memory->config + offset + 4) << 32 | read32(memory->config + offset);
}

/* Sends a request and waits for its answer. */
static struct response ask(struct memory *memory, u16 type, u64 at, u16 blocks) {
    u64 descriptors = memory->rings, available = memory->rings + 0x1000, used = memory->rings + 0x2000;
    struct request *request = (void *)(memory->rings + 0x3000);
    struct response *response = (void *)(memory->rings + 0x3800);
    struct descriptor *chain = (void *)descriptors;
    *request = (struct request){.type = type, .at = at, .count = blocks};
    *response = (struct response){.type = 0xffff};
    chain[0] = (struct descriptor){(u64)request, sizeof *request, NEXT, 1};
    chain[1] = (struct descriptor){(u64)response, sizeof *response, WRITE, 0};
    write16(available + 4 + 2 * (memory->sent % QUEUE), 0);
    memory->sent++;
    write16(available + 2, memory->sent);
    write32(memory->doorbell, 0);
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

static void write_address(struct memory *memory, u32 offset, u64 value) {
    write32(memory->common + offset, (u32)value);
    write32(memory->common + offset + 4, (u32)(value >> 32));
}

static void find(struct function *function) {
    if (function->id != 0x10581af4 || count == DEVICES)
        return;
    struct memory *memory = &devices[count];
    *memory = (struct memory){.at = function->at, .rings = RINGS + count * 0x10000};
    count++;
    u32 at = config_read(function->at, CAPABILITY_LIST, 1);
    for (u32 i = 0; at && i < 48; i++, at = config_read(function->at, at + 1, 1)) {
        if (config_read(function->at, at, 1) != CAP_VENDOR)
            continue;
        u64 structure = function->bars[0].base + config_read(function->at, at + 8, 4);
        u32 type = config_read(function->at, at + 3, 1);
        if (type == 1)
            memory->common = structure;
        if (type == 2)
            memory->doorbell = structure;
        if (type == 4)
            memory->config = structure;
    }
    reach(function->bars[0].base, function->bars[0].size);
    config_write(function->at, COMMAND, 2, DECODE_MEMORY | BUS_MASTER);
    require(memory->common && memory->doorbell && memory->config, "a memory device lacks a structure");
    for (u64 word = memory->rings; word < memory->rings + 0x4000; word += 8)
        write64(word, 0);
    msix_fill(function, 0, VECTOR);
    msix_control(function->at, MSIX_ON);
    write8(memory->common + STATUS, 0);
    write8(memory->common + STATUS, 3);
    write32(memory->common + FEATURE_SELECT, 0);
    write32(memory->common + FEATURE, 3); /* node, and blocks that are not plugged are left alone */
    write32(memory->common + FEATURE_SELECT, 1);
    write32(memory->common + FEATURE, 1);
    write8(memory->common + STATUS, 11);
    write16(memory->common + CONFIG_VECTOR, 0);
    write16(memory->common + QUEUE_SELECT, 0);
    write16(memory->common + SIZE, QUEUE);
    write_address(memory, DESCRIPTORS, memory->rings);
    write_address(memory, AVAILABLE, memory->rings + 0x1000);
    write_address(memory, USED, memory->rings + 0x2000);
    write16(memory->common + ENABLE, 1);
    write8(memory->common + STATUS, 15);
    memory->block = field(memory, BLOCK);
    say("region %lx size %lx block %lx node %u\n", field(memory, ADDRESS), field(memory, REGION), memory->block,
        read16(memory->config + NODE));
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
    while (serial_read() < 0) {
        if (seen == interrupt_count[VECTOR]) {
            short_pause();
            continue;
        }
        seen = interrupt_count[VECTOR];
        for (u32 i = 0; i < count; i++)
            follow(&devices[i]);
    }
    if (option("reset", 0))
        out8(0xcf9, 6);
}
