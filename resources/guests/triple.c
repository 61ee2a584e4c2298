/* Ends by a triple fault: a page fault with an empty interrupt table. */
#include "runtime.h"

void guest(void) {
    struct __attribute__((packed)) { u16 limit; u64 base; } nothing = {0, 0};
    say("about to fault\n");
    __asm__ volatile("lidt %0" ::"m"(nothing));
    (void)read8(1ull << 46); /* nothing maps this */
    fail("still running after a triple fault");
}
