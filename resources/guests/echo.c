/* Reads serial input up to a newline and prints it as `echo: TEXT`. With `by=interrupt` it sleeps until the serial
 * port's interrupt (GSI 4, edge) arrives; else it polls, after some milliseconds with rests. */
#include "ioapic.h"
#include "runtime.h"

enum { COM1 = 0x3f8, INTERRUPT_ENABLE = 1, MODEM_CONTROL = 4, SERIAL_GSI = 4, SERIAL_VECTOR = 0x24 };

static int next_byte(bool by_interrupt) {
    u32 looks = 0;
    for (;;) {
        int c = serial_read();
        if (c >= 0)
            return c;
        if (!by_interrupt) {
            rest(&looks);
        } else {
            /* Interrupts are off here and sti takes effect after hlt has begun, so no wake-up is lost. */
            __asm__ volatile("sti; hlt; cli" ::: "memory");
        }
    }
}

void guest(void) {
    char text[256], way[16];
    u32 length = 0;
    bool by_interrupt = option_text("by", way, sizeof way) && text_equal(way, "interrupt");
    if (by_interrupt) {
        apic_start();
        ioapic_route(SERIAL_GSI, SERIAL_VECTOR, false);
        out8(COM1 + MODEM_CONTROL, 0x0b); /* OUT2 lets the interrupt out of the chip */
        out8(COM1 + INTERRUPT_ENABLE, 1);
    }
    say("ready\n");
    for (int c = next_byte(by_interrupt); c != '\n' && c != '\r' && length < sizeof text - 1; c = next_byte(by_interrupt))
        text[length++] = (char)c;
    text[length] = 0;
    say("echo: %s\n", text);
    /* A line that came at once was read without sleeping; its interrupt waits. */
    for (u32 i = 0; by_interrupt && i < 1000 && !interrupt_count[SERIAL_VECTOR]; i++)
        __asm__ volatile("sti; nop; pause; cli" ::: "memory");
    require(!by_interrupt || interrupt_count[SERIAL_VECTOR], "no serial interrupt");
}
