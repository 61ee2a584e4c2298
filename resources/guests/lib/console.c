/* Prints on the serial port and the debug console, and ends the guest. */
#include <stdarg.h>
#include "runtime.h"

/* Once its FIFO is empty the chip takes so many bytes without a look at it (PC16550D data sheet, 8.6.2). */
enum { FIFO_SIZE = 16 };
enum { COM1 = 0x3f8, FIFO_CONTROL = 2, LINE_CONTROL = 3, LINE_STATUS = 5, DEBUG_CONSOLE = 0xe9, DEBUG_EXIT = 0xf4, SLEEP_CONTROL = 0x600 };

void put(enum channel channel, char c) {
    if (channel == REPORT) {
        out8(DEBUG_CONSOLE, (u8)c);
        return;
    }
    static u32 room;
    u32 left = room;
    if (!left) {
        out8(COM1 + FIFO_CONTROL, 1);
        for (u32 tries = 0; tries < 100000 && !(in8(COM1 + LINE_STATUS) & 0x20); tries++) {
        }
        left = FIFO_SIZE;
    }
    out8(COM1, (u8)c);
    room = left - 1;
}

int serial_read(void) { return in8(COM1 + LINE_STATUS) & 1 ? in8(COM1) : -1; }

static void put_number(enum channel channel, u64 value, u32 base, u32 width, char fill, bool minus) {
    char digits[24];
    u32 count = 0;
    do {
        digits[count++] = "0123456789abcdef"[value % base];
        value /= base;
    } while (value);
    if (minus)
        put(channel, '-');
    for (u32 i = count + minus; i < width; i++)
        put(channel, fill);
    while (count)
        put(channel, digits[--count]);
}

static void print_list(enum channel channel, const char *format, va_list list) {
    for (; *format; format++) {
        if (*format != '%') {
            put(channel, *format);
            continue;
        }
        char fill = *++format == '0' ? '0' : ' ';
        u32 width = 0;
        while (*format >= '0' && *format <= '9')
            width = width * 10 + (u32)(*format++ - '0');
        bool wide = *format == 'l';
        format += wide;
        switch (*format) {
        case 's':
            for (const char *text = va_arg(list, const char *); *text; text++)
                put(channel, *text);
            break;
        case 'c':
            put(channel, (char)va_arg(list, int));
            break;
        case 'd': {
            int64_t value = wide ? va_arg(list, int64_t) : va_arg(list, int);
            put_number(channel, value < 0 ? -(u64)value : (u64)value, 10, width, fill, value < 0);
            break;
        }
        case 'u':
            put_number(channel, wide ? va_arg(list, u64) : va_arg(list, u32), 10, width, fill, false);
            break;
        case 'x':
            put_number(channel, wide ? va_arg(list, u64) : va_arg(list, u32), 16, width, fill, false);
            break;
        default:
            put(channel, *format);
        }
    }
}

void print(enum channel channel, const char *format, ...) {
    va_list list;
    va_start(list, format);
    print_list(channel, format, list);
    va_end(list);
}

__attribute__((noreturn)) static void stop(void) {
    for (;;)
        __asm__ volatile("cli; hlt");
}

void debug_exit(u8 value) {
    out8(DEBUG_EXIT, value);
    stop();
}

void power_off(void) {
    out8(SLEEP_CONTROL, 0x34); /* SLP_EN and sleep type 5 */
    debug_exit(0);
}

void pass(void) {
    say("PASS\n");
    debug_exit(0);
}

void fail(const char *format, ...) {
    va_list list;
    say("FAIL ");
    va_start(list, format);
    print_list(SERIAL, format, list);
    va_end(list);
    say("\n");
    debug_exit(1);
}
