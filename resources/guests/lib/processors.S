# Start of the other processors: real mode at 0x8000 (SIPI vector 0x08), to long mode with the first processor's page
# tables, to processor_started() on a stack of its own.

    .section .text.processors, "ax"
    .code16
    .globl processor_trampoline
processor_trampoline:
    cli
    cld
    xor %ax, %ax
    mov %ax, %ds
    lgdtl 0x8000 + trampoline_gdt - processor_trampoline
    mov %cr0, %eax
    or $1, %eax
    mov %eax, %cr0
    ljmpl $0x18, $processor_protected
    .align 8
trampoline_gdt:
    .word 31
    .long gdt
    .globl processor_trampoline_end
processor_trampoline_end:

    .code32
processor_protected:
    mov $0x10, %eax
    mov %eax, %ds
    mov %eax, %es
    mov %eax, %ss
    mov %cr4, %eax
    or $1 << 5, %eax
    mov %eax, %cr4
    mov $page_map_level_4, %eax
    mov %eax, %cr3
    mov $0xc0000080, %ecx
    rdmsr
    or $1 << 8, %eax
    wrmsr
    mov %cr0, %eax
    or $0x80000001, %eax
    mov %eax, %cr0
    ljmp $0x08, $1f
    .code64
1:  mov $1, %eax
    lock xadd %eax, processors_seen
    inc %eax
    shl $10, %eax
    lea processor_stacks(%rax), %rsp
    call processor_started
2:  cli
    hlt
    jmp 2b

    .data
    .align 4
processors_seen:
    .long 0

    .section .scratch, "aw", @nobits
    .align 4096
processor_stacks:
    .skip 256 * 1024
