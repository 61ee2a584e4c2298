# Takes a PVH guest from its 32-bit entry to 64-bit C code with the first 4 GiB mapped one to one.
# The boot loader enters with EBX = address of the start information, paging and interrupts off, flat segments.

    .section .note.Xen, "a", @note
    .align 4
    .long 4, 8, 18                  # name size, descriptor size, type 18: 32-bit entry point
    .asciz "Xen"
    .quad _start

    .section .text.start, "ax"
    .code32
    .globl _start
_start:
    cli
    cld
    mov %ebx, %esi
    mov $bss_start, %edi
    mov $bss_end, %ecx
    sub %edi, %ecx
    shr $2, %ecx
    xor %eax, %eax
    rep stosl

    mov $stack_top, %esp
    mov $page_directory_pointers + 3, %eax
    mov %eax, page_map_level_4

    # 1 GiB pages where CPUID has them (leaf 0x80000001, EDX bit 26), else four tables of 2 MiB pages.
    mov $0x80000000, %eax
    cpuid
    cmp $0x80000001, %eax
    jb 1f
    mov $0x80000001, %eax
    cpuid
    test $1 << 26, %edx
    jz 1f
    movb $1, gigabyte_pages
    movl $0x00000083, page_directory_pointers
    movl $0x40000083, page_directory_pointers + 8
    movl $0x80000083, page_directory_pointers + 16
    movl $0xc0000083, page_directory_pointers + 24
    jmp 4f
1:  movl $page_directories + 0x0003, page_directory_pointers
    movl $page_directories + 0x1003, page_directory_pointers + 8
    movl $page_directories + 0x2003, page_directory_pointers + 16
    movl $page_directories + 0x3003, page_directory_pointers + 24
    mov $page_directories, %edi
    mov $2048, %ecx
    mov $0x83, %eax
2:  mov %eax, (%edi)
    movl $0, 4(%edi)
    add $0x200000, %eax
    add $8, %edi
    dec %ecx
    jnz 2b

4:  mov %cr4, %eax
    or $1 << 5, %eax                # PAE
    mov %eax, %cr4
    mov $page_map_level_4, %eax
    mov %eax, %cr3
    mov $0xc0000080, %ecx           # EFER
    rdmsr
    or $1 << 8, %eax                # LME
    wrmsr
    mov %cr0, %eax
    or $0x80000001, %eax            # PG, PE
    mov %eax, %cr0
    lgdt gdt_pointer
    ljmp $0x08, $5f

    .code64
5:  mov $0x10, %eax
    mov %eax, %ds
    mov %eax, %es
    mov %eax, %ss
    xor %eax, %eax
    mov %eax, %fs
    mov %eax, %gs
    mov $stack_top, %esp
    mov %esi, %edi
    call runtime_start
6:  cli
    hlt
    jmp 6b

    .data
    .align 8
    .globl gdt
gdt:
    .quad 0
    .quad 0x00af9a000000ffff        # 08: 64-bit code
    .quad 0x00cf92000000ffff        # 10: data
    .quad 0x00cf9a000000ffff        # 18: 32-bit code, for the start of other processors
    .globl gdt_pointer
gdt_pointer:
    .word gdt_pointer - gdt - 1
    .quad gdt

    .bss
    .align 4096
    .globl page_map_level_4
page_map_level_4:
    .skip 4096
page_directory_pointers:
    .skip 4096
    .globl gigabyte_pages
gigabyte_pages:
    .skip 1

    .section .scratch, "aw", @nobits
    .align 4096
page_directories:
    .skip 4 * 4096
    # As deep as a walk of 256 buses nested in each other.
    .skip 256 * 1024
stack_top:
