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
