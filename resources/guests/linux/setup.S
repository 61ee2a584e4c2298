# The setup header of a small bzImage (Linux Documentation/arch/x86/boot.rst): boot sector and one setup sector, all
# data. Only the 64-bit entry at 0x200 of the protected-mode part exists; real mode and 32-bit entry do not.
    .section .setup, "a"
    .org 0x1f1
    .byte 1                         # setup_sects: one after the boot sector
    .word 0                         # root_flags
    .long system_size               # syssize: the rest of the file in units of 16 bytes
    .word 0, 0, 0                   # ram_size, vid_mode, root_dev
    .word 0xaa55                    # boot_flag
    .byte 0xeb, 0x66                # jump: the header ends at 0x202 + 0x66
    .ascii "HdrS"
    .word 0x020f                    # version 2.15
    .long 0                         # realmode_swtch
    .word 0, 0                      # start_sys_seg, kernel_version
    .byte 0                         # type_of_loader: the loader writes it
    .byte 1                         # loadflags: loaded high
    .word 0                         # setup_move_size
    .long 0x100000                  # code32_start
    .long 0, 0                      # ramdisk_image, ramdisk_size
    .long 0                         # bootsect_kludge
    .word 0                         # heap_end_ptr
    .byte 0, 0                      # ext_loader_ver, ext_loader_type
    .long 0                         # cmd_line_ptr
    .long 0x7fffffff                # initrd_addr_max
    .long 0x200000                  # kernel_alignment
    .byte 1                         # relocatable_kernel
    .byte 21                        # min_alignment
    .word 3                         # xloadflags: 64-bit entry, may be loaded above 4 GiB
    .long 2047                      # cmdline_size
    .long 0                         # hardware_subarch
    .quad 0                         # hardware_subarch_data
    .long 0, 0                      # payload_offset, payload_length
    .quad 0                         # setup_data
    .quad 0x400000                  # pref_address
    .long 0x100000                  # init_size
    .long 0                         # handover_offset
    .long 0                         # kernel_info_offset
    .org 0x400
