# 64-bit entry of the Linux boot protocol: RSI = zero page, interrupts off, the first memory mapped one to one.
# Position independent: a loader may have moved the image.
    .section .text.start, "ax"
    .code64
    .globl _start
_start:
    cli
    cld
    lea linux_stack_top(%rip), %rsp
    mov %rsi, %rdi
    lea _start(%rip), %rsi
    call linux_start
1:  hlt
    jmp 1b

    .bss
    .align 16
    .skip 8192
linux_stack_top:
