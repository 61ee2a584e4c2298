# The guest of the start-up benchmark: writes X to the serial port, then halts, so that the hypervisor's memory can be read.
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
1:  hlt
    jmp 1b
