/* An honest driver of network interfaces whose other side sends back what it gets (virtio 1.2, 2.7, 4.1.4 and 5.1): on each
 * one it sends `packets=N` (default 16) packets of `bytes=N` (default 1000), one after the other, and compares what comes
 * back. Prints `interface N packets P` for each. */
#include "device.h"
#include "runtime.h"
#include "virtio.h"

enum { ENTRIES = 16, HEADER = 12, LARGEST = 1514, BUFFER = 2048, AREA = 32 << 20, AREA_SIZE = 0x10000 };

void guest(void) {
    u32 packets = (u32)option("packets", 16), bytes = (u32)option("bytes", 1000), count = 0;
    require(bytes >= 8 && bytes <= LARGEST, "bytes are too many or too few");
    pci_start();
    walk();
    for (u32 i = 0; i < function_count; i++) {
        struct virtio net;
        if (!virtio_find(&functions[i], VIRTIO_NET, &net))
            continue;
        u64 area = AREA + (u64)count * 2 * AREA_SIZE;
        struct stream receive = {&net, area, BUFFER, 0, ENTRIES, true, 0, 0};
        struct stream send = {&net, area + AREA_SIZE, BUFFER, 1, ENTRIES, false, 0, 0};
        virtio_begin(&net, 0);
        stream_start(&receive);
        stream_start(&send);
        virtio_ready(&net);
        for (u32 packet = 0; packet < packets; packet++) {
            stream_make(&receive, BUFFER);
            u64 data = stream_next(&send);
            for (u32 at = 0; at < HEADER + bytes; at++)
                write8(data + at, at < HEADER ? 0 : (u8)(at * 7 + packet));
            stream_make(&send, HEADER + bytes);
            require(stream_wait(&send, 100000), "packet %u was not sent", packet);
            require(stream_wait(&receive, 100000), "packet %u did not come back", packet);
            u32 length;
            u64 room = stream_take(&receive, &length);
            require(room && length == HEADER + bytes, "packet %u has %u bytes", packet, length);
            for (u32 at = HEADER; at < length; at++)
                require(read8(room + at) == (u8)(at * 7 + packet), "packet %u came back as another", packet);
        }
        say("interface %u packets %u\n", count++, packets);
    }
    require(count, "no interface");
}
