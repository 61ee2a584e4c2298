/* More serial output than a pipe holds, as fast as a guest can: `lines=N` lines of 64 bytes, numbered from 0. Then `flood over`
 * on the debug console, which tells that no write had to wait for a reader. */
#include "runtime.h"

enum { COM1 = 0x3f8, WIDTH = 64, DIGITS = 8 };

void guest(void) {
    static char line[WIDTH];
    u64 lines = option("lines", 2048);
    for (u32 i = 0; i < WIDTH; i++)
        line[i] = "line 00000000 "[i < 14 ? i : 13];
    line[WIDTH - 1] = '\n';
    for (u64 n = 0; n < lines; n++) {
        const void *from = line;
        u64 count = WIDTH;
        __asm__ volatile("rep outsb" : "+S"(from), "+c"(count) : "d"(COM1) : "memory");
        for (u32 i = 5 + DIGITS; i-- > 5;) {
            if (line[i] != '9') {
                line[i]++;
                break;
            }
            line[i] = '0';
        }
    }
    report("flood over\n");
}
