# The smallest useful guest: prints X and a newline at once, then powers off. Measures the time to a guest's first byte.
# Waits for nothing, since the serial port's FIFO is empty at start. With STILL it stands still in place of powering off, which
# leaves time to look at what runs it.
    .section .note.Xen, "a", @note
    .align 4
    .long 4, 4, 18                  # name size, descriptor size, type 18: 32-bit entry point
    .asciz "Xen"
    .long _start

    .text
    .code32
    .globl _start
_start:
    mov $0x3f8, %dx
    mov $'X', %al
    out %al, %dx
    mov $'\n', %al
    out %al, %dx
#ifndef STILL
    mov $0x600, %dx                 # ACPI sleep control: sleep enable, type 5
    mov $0x34, %al
    out %al, %dx
    xor %al, %al                    # no such port: end by the debug exit
    out %al, $0xf4
#endif
1:  hlt
    jmp 1b
