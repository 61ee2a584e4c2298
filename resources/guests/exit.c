/* Ends by the debug exit with the value of `code=` (default 0). With `panic=N` it writes N to the panic port first and waits
 * for a while. */
#include "runtime.h"

void guest(void) {
    u8 panic = (u8)option("panic", 0);
    if (panic) {
        say("panic %u\n", panic);
        out8(0x505, panic);
        for (u32 i = 0; i < 100000; i++)
            short_pause();
        say("still running\n");
        power_off();
    }
    debug_exit((u8)option("code", 0));
}
