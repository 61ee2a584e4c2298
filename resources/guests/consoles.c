/* Two consoles: a line that is typed on the serial port comes back there as `serial: LINE`, one that is typed on the virtio
 * console (virtio 1.2, 5.3) as `console: LINE` there. Prints `ready` on both. Never ends. */
#include "device.h"
#include "runtime.h"
#include "virtio.h"

enum { ENTRIES = 16, LINE = 256, AREA = 32 << 20, AREA_SIZE = 0x10000 };

static struct virtio console;
static struct stream input = {&console, AREA, LINE, 0, ENTRIES, true, 0, 0};
static struct stream output = {&console, AREA + AREA_SIZE, LINE, 1, ENTRIES, false, 0, 0};

static void start(void) {
    virtio_begin(&console, 0);
    stream_start(&input);
    stream_start(&output);
    virtio_ready(&console);
    for (u32 i = 0; i < ENTRIES; i++)
        stream_make(&input, LINE);
}

static void print_there(const char *text, const char *line) {
    u32 length = 0;
    volatile char *room = (volatile char *)stream_next(&output);
    for (const char *c = text; *c; c++)
        room[length++] = *c;
    for (const char *c = line; *c && length < LINE - 1; c++)
        room[length++] = *c;
    room[length++] = '\n';
    stream_make(&output, length);
    require(stream_wait(&output, 1000000), "the console takes nothing");
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
    u32 looks = 0;
    for (;;) {
        int c = serial_read();
        if (c >= 0 && add(lines[0], &lengths[0], (char)c))
            say("serial: %s\n", lines[0]);
        u32 length;
        if (c >= 0)
            looks = 0;
        for (u64 typed; (typed = stream_take(&input, &length)); stream_make(&input, LINE), looks = 0)
            for (u32 i = 0; i < length; i++)
                if (add(lines[1], &lengths[1], (char)read8(typed + i)))
                    print_there("console: ", lines[1]);
        if (c < 0)
            rest(&looks);
    }
}
