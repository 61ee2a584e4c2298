/* What a driver does with a virtio device on PCI (virtio 1.2, 2.7 and 4.1.4). */
#pragma once
#include "pci.h"

struct virtio {
    place at;
    u64 common, doorbell; /* addresses of the structures; the doorbell is queue 0's */
    u64 config;           /* address of what belongs to its kind; 0 without */
    u32 step;             /* from a queue's doorbell to the next one's */
    u32 window;           /* offset of the capability for accesses through configuration space */
};

enum { VIRTIO_NET = 1, VIRTIO_DISK = 2, VIRTIO_CONSOLE = 3, VIRTIO_RANDOM = 4, VIRTIO_SOCKETS = 19, VIRTIO_MEMORY = 24 };
enum { VIRTIO_FEATURE_SELECT = 0x08, VIRTIO_FEATURE = 0x0c, VIRTIO_CONFIG_VECTOR = 0x10, VIRTIO_STATUS = 0x14,
       VIRTIO_QUEUE_SELECT = 0x16, VIRTIO_SIZE = 0x18, VIRTIO_VECTOR = 0x1a, VIRTIO_ENABLE = 0x1c, VIRTIO_DESCRIPTORS = 0x20, VIRTIO_AVAILABLE = 0x28, VIRTIO_USED = 0x30 };
enum { VIRTIO_NO_VECTOR = 0xffff };
enum { DESCRIPTOR_NEXT = 1, DESCRIPTOR_WRITE = 2, DESCRIPTOR_INDIRECT = 4 };

struct descriptor { u64 at; u32 len; u16 flags, next; };

/* The structures of a device of this kind; false for another function. Switches decode and bus mastering on. */
bool virtio_find(struct function *function, u32 kind, struct virtio *device);
/* Reset, then a driver that takes VIRTIO_F_VERSION_1 and these of the features 0 to 31, and nothing else. */
void virtio_begin(struct virtio *device, u32 features);
/* Sets a queue up whose three parts are at these addresses. */
void virtio_queue(struct virtio *device, u16 queue, u16 size, u64 descriptors, u64 available, u64 used, u16 vector);
/* The driver is ready. */
void virtio_ready(struct virtio *device);

/* A queue of buffers of one size, a descriptor each, that go round: available in this order and used in this order. Its rings
 * are at the start of `area`, the buffers from STREAM_BUFFERS on. Nothing interrupts. */
struct stream {
    struct virtio *device;
    u64 area;
    u32 size;           /* bytes of a buffer */
    u16 queue, entries; /* entries: a power of two up to 256 */
    bool filled;        /* the device fills its buffers */
    u16 made, taken;
};
enum { STREAM_BUFFERS = 0x4000 };

/* Sets its queue up, with nothing available. */
void stream_start(struct stream *stream);
/* The buffer that is made available next. */
u64 stream_next(const struct stream *stream);
/* Makes the next buffer available, `length` bytes of it; its address. */
u64 stream_make(struct stream *stream, u32 length);
/* The next buffer that the device has used, and the bytes in it; 0 if there is none. */
u64 stream_take(struct stream *stream, u32 *length);
/* Waits until the device has used all that is available; false after `tries`. */
bool stream_wait(const struct stream *stream, u32 tries);
