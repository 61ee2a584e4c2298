# A 64 KiB firmware image: starts at the reset vector (F000:FFF0, code segment base 0xFFFF0000), prints a line on the
# serial port from the ROM itself, and ends by the debug exit with 0.
    .text
    .code16
    .globl _start
_start:
    cli
    cld
    mov $message, %si
    mov $0x3f8, %dx
1:  mov %cs:(%si), %al
    test %al, %al
    jz 2f
    out %al, %dx
    inc %si
    jmp 1b
2:  xor %al, %al
    out %al, $0xf4
3:  hlt
    jmp 3b
message:
    .asciz "firmware at the reset vector\nPASS\n"

    .org 0xfff0
    jmp _start
    .org 0x10000
