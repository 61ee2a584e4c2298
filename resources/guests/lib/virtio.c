/* Capabilities and registers of virtio devices. */
#include "virtio.h"
#include "runtime.h"

bool virtio_find(struct function *function, u32 kind, struct virtio *device) {
    if (function->id != ((0x1040 + kind) << 16 | 0x1af4) || !function->bars[0].base)
        return false;
    *device = (struct virtio){.at = function->at};
    u32 at = config_read(function->at, CAPABILITY_LIST, 1);
    for (u32 i = 0; at && i < 48; i++, at = config_read(function->at, at + 1, 1)) {
        if (config_read(function->at, at, 1) != CAP_VENDOR)
            continue;
        u64 structure = function->bars[0].base + config_read(function->at, at + 8, 4);
        u32 type = config_read(function->at, at + 3, 1);
        if (type == 1)
            device->common = structure;
        if (type == 2) {
            device->doorbell = structure;
            device->step = config_read(function->at, at + 16, 4);
        }
        if (type == 4)
            device->config = structure;
        if (type == 5)
            device->window = at;
    }
    reach(function->bars[0].base, function->bars[0].size);
    config_write(function->at, COMMAND, 2, DECODE_MEMORY | BUS_MASTER);
    return device->common && device->doorbell;
}

static void write_address(struct virtio *device, u32 offset, u64 value) {
    write32(device->common + offset, (u32)value);
    write32(device->common + offset + 4, (u32)(value >> 32));
}

void virtio_begin(struct virtio *device, u32 features) {
    write8(device->common + VIRTIO_STATUS, 0);
    write8(device->common + VIRTIO_STATUS, 3);
    write32(device->common + VIRTIO_FEATURE_SELECT, 0);
    write32(device->common + VIRTIO_FEATURE, features);
    write32(device->common + VIRTIO_FEATURE_SELECT, 1);
    write32(device->common + VIRTIO_FEATURE, 1);
    write8(device->common + VIRTIO_STATUS, 11);
}

void virtio_queue(struct virtio *device, u16 queue, u16 size, u64 descriptors, u64 available, u64 used, u16 vector) {
    write16(device->common + VIRTIO_QUEUE_SELECT, queue);
    write16(device->common + VIRTIO_SIZE, size);
    write16(device->common + VIRTIO_VECTOR, vector);
    write_address(device, VIRTIO_DESCRIPTORS, descriptors);
    write_address(device, VIRTIO_AVAILABLE, available);
    write_address(device, VIRTIO_USED, used);
    write16(device->common + VIRTIO_ENABLE, 1);
}

void virtio_ready(struct virtio *device) { write8(device->common + VIRTIO_STATUS, 15); }

enum { STREAM_AVAILABLE = 0x2000, STREAM_USED = 0x3000 };

static u64 stream_buffer(const struct stream *stream, u32 number) {
    return stream->area + STREAM_BUFFERS + (u64)stream->size * (number % stream->entries);
}

void stream_start(struct stream *stream) {
    u64 available = stream->area + STREAM_AVAILABLE, used = stream->area + STREAM_USED;
    for (u64 at = stream->area; at < stream->area + STREAM_BUFFERS; at += 8)
        write64(at, 0);
    write16(available, 1); /* no interrupts */
    virtio_queue(stream->device, stream->queue, stream->entries, stream->area, available, used, VIRTIO_NO_VECTOR);
    stream->made = stream->taken = 0;
}

u64 stream_next(const struct stream *stream) { return stream_buffer(stream, stream->made); }

u64 stream_make(struct stream *stream, u32 length) {
    u64 buffer = stream_next(stream), available = stream->area + STREAM_AVAILABLE;
    u16 slot = stream->made % stream->entries;
    struct descriptor *descriptors = (void *)stream->area;
    descriptors[slot] = (struct descriptor){buffer, length, stream->filled ? DESCRIPTOR_WRITE : 0, 0};
    write16(available + 4 + 2 * slot, slot);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    write16(available + 2, ++stream->made);
    write16(stream->device->doorbell + (u64)stream->device->step * stream->queue, stream->queue);
    return buffer;
}

u64 stream_take(struct stream *stream, u32 *length) {
    u64 used = stream->area + STREAM_USED;
    if (read16(used + 2) == stream->taken)
        return 0;
    u64 entry = used + 4 + 8 * (u64)(stream->taken++ % stream->entries);
    *length = read32(entry + 4);
    return stream_buffer(stream, read32(entry));
}

bool stream_wait(const struct stream *stream, u32 tries) {
    while (read16(stream->area + STREAM_USED + 2) != stream->made) {
        if (!tries--)
            return false;
        short_pause();
    }
    return true;
}
