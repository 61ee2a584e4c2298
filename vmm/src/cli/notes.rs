//! Texts at the end of help: values, exit codes, examples.

/// At the end of `banyan --help`.
pub(super) const OVERVIEW: &str = "\
Examples:
  banyan demo
  banyan run --kernel vmlinuz --initramfs initrd.img --cmdline console=ttyS0 --memory 2G \\
      --device 0000:03:00.0 --pcie topology=host

Each command has its own --help, with every key, default, exit code and examples.";

/// At the end of `banyan run --help`.
pub(super) const RUN_NOTES: &str = "\
Values:
  Keys are written with - or _, each once. A value that holds a comma stands
  in double quotes, for the shell as --disk 'path=\"a,b.img\"'. [A,B] is a list.

Exit codes:
  0      the guest powered off, or Ctrl-A x was typed
  1      an error, before the start or later; standard error says which
  2      the command line is wrong
  4      the guest reset itself, or its watchdog did, and --no-reboot was given
  6      triple fault: the guest's processor had no way to go on
  8      KVM could not go on, as with an instruction that it does not emulate
  10     the guest's kernel said by the panic port of vm.create that it panicked
  odd    with --debug-exit: 2 * N + 1, N being what the guest wrote to port 0xF4
  128+S  ended by signal S: 129 SIGHUP, 130 SIGINT, 131 SIGQUIT, 143 SIGTERM

Examples:
  A Debian kernel with its initramfs, on this terminal:
    banyan run --kernel /boot/vmlinuz-$(uname -r) --initramfs initrd.img \\
        --cmdline console=ttyS0 --cpus 2 --memory 2G

  A GPU and a NIC of the host, below the same switches as on the host:
    banyan run --kernel vmlinuz --initramfs initrd.img \\
        --cmdline console=ttyS0 --memory 64G,hugepages=1G \\
        --pcie topology=host --device 0000:03:00.0,id=gpu0,clique=0 \\
        --device 0000:04:00.0,id=nic0

  What that guest would see, without starting it:
    banyan run --dry-run -v --pcie topology=host \\
        --device 0000:03:00.0 --device 0000:04:00.0

  An emulated GPU, on any machine:
    banyan run --dry-run -v --device stub,id=gpu0,ids=10de:20b8,\\
class=030200,bar0=16M:mem32,bar1=128G:mem64:prefetchable,msix=8,clique=0";
