# Interrupt entry points: one stub per vector, all leading to interrupt_entered(frame) with the general registers saved.
# The processor pushes an error code for some exceptions; the others push a zero, so that every frame looks the same.

    .text
    .code64
    .altmacro
    .macro stub vector
    .align 16
    .if (\vector == 8) || (\vector >= 10 && \vector <= 14) || (\vector == 17) || (\vector == 21) || (\vector == 29) || (\vector == 30)
    .else
    push $0
    .endif
    push $\vector
    jmp interrupt_common
    .endm

    .align 16
    .globl interrupt_stubs
interrupt_stubs:
    .set vector, 0
    .rept 96
    stub %vector
    .set vector, vector + 1
    .endr

interrupt_common:
    push %rax
    push %rcx
    push %rdx
    push %rbx
    push %rbp
    push %rsi
    push %rdi
    push %r8
    push %r9
    push %r10
    push %r11
    push %r12
    push %r13
    push %r14
    push %r15
    cld
    mov %rsp, %rdi
    call interrupt_entered
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %r11
    pop %r10
    pop %r9
    pop %r8
    pop %rdi
    pop %rsi
    pop %rbp
    pop %rbx
    pop %rdx
    pop %rcx
    pop %rax
    add $16, %rsp
    iretq
