//! What boots, how, and where it is put: field cases F3, F4 and F5 on /dev/kvm.
#![expect(clippy::unwrap_used, reason = "helpers of tests end a test that cannot go on")]

use std::fs;
use std::path::Path;

use tests::guest::{Guest, image};

/// The checksum that the guests print of their initial RAM disk: one word of each page, rotated and mixed.
fn page_checksum(bytes: &[u8]) -> u64 {
    let word = |at: usize| bytes.get(at..at + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes);
    let pages = (0..bytes.len().saturating_sub(7)).step_by(4096);
    let sum = pages.fold(0u64, |sum, at| sum.rotate_left(1) ^ word(at));
    sum.rotate_left(1) ^ word(bytes.len() - 8)
}

/// Bytes that differ from page to page.
fn pattern(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (page, number) in bytes.chunks_mut(4096).zip(1u64..) {
        let word = number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
        for (byte, value) in page.iter_mut().zip(word) {
            *byte = value;
        }
    }
    bytes
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn the_smallest_guest_prints_one_line_and_powers_off() {
    let outcome = Guest::new("hello").run();
    assert_eq!(outcome.expect_code(0).stdout, "X\n", "{outcome}");
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_f3_a_kernel_boots_with_a_pvh_note_without_one_and_as_a_bzimage() {
    Guest::new("memory").passes();
    for file in ["linux64.elf", "bzImage"] {
        let outcome = Guest::from_arguments(&["--kernel", &image(file)]).options("quiet root=/dev/vda").passes();
        outcome.expect_output(&["command line: quiet root=/dev/vda\n"]);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_f4_a_bzimage_runs_at_the_address_that_was_asked_for() {
    let boot = |arguments: &[&str]| Guest::from_arguments(&["--kernel", &image("bzImage")]).with(arguments).passes();
    boot(&[]).expect_output(&["entered at 400200,"]);
    boot(&["--load-address", "32M"]).expect_output(&["entered at 2000200,", "code32_start 2000000\n"]);
    boot(&["--load-address", "0x10000000"]).expect_output(&["entered at 10000200,", "code32_start 10000000\n"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_f4_a_kernel_that_cannot_be_moved_is_refused_before_it_starts() {
    for file in ["memory.elf", "linux64.elf"] {
        let outcome = Guest::from_arguments(&["--kernel", &image(file), "--load-address", "0x2000000"]).run();
        outcome.expect_code(1).expect_error(&[file, "0x2000000", "bzImage"]);
        assert_eq!(outcome.stdout, "");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_f4_a_bzimage_is_refused_where_it_cannot_run() {
    for (address, parts) in [("0x2000001", ["0x2000001", "align"]), ("1G", ["0x000040000000-", "raise --memory"])] {
        let outcome = Guest::from_arguments(&["--kernel", &image("bzImage"), "--load-address", address]).run();
        outcome.expect_code(1).expect_error(&parts);
        assert_eq!(outcome.stdout, "");
    }
    Guest::from_arguments(&["--kernel", &image("linux64.elf"), "--load-address", "2M"]).passes();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_f5_an_initramfs_of_200_mib_finds_its_place_in_any_size_of_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("initrd");
    let bytes = pattern((200 << 20) + 1000);
    fs::write(&path, &bytes).unwrap();
    let sum = format!("checksum=0x{:x}", page_checksum(&bytes));
    for memory in ["1G", "2G", "3G", "4G", "8G"] {
        let boot = |kernel: &str| {
            Guest::from_arguments(&["--kernel", &image(kernel), "--memory", memory, "--initramfs", path.to_str().unwrap()])
        };
        boot("initrd.elf").options(&sum).passes();
        boot("linux64.elf").passes().expect_output(&[&sum.replace("=0x", " ")]);
        if memory == "3G" {
            boot("bzImage").passes().expect_output(&[&sum.replace("=0x", " ")]);
        }
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn an_initramfs_that_is_larger_than_memory_is_refused_with_both_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("initrd");
    fs::File::create(&path).unwrap().set_len(65 << 20).unwrap();
    let outcome = Guest::new("initrd").with(&["--memory", "64M", "--initramfs", path.to_str().unwrap()]).run();
    outcome.expect_code(1).expect_error(&[&(65 << 20).to_string(), &(64 << 20).to_string(), "give more memory"]);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn firmware_starts_at_the_reset_vector() {
    let outcome = Guest::from_arguments(&["--firmware", &image("firmware.bin")]).passes();
    outcome.expect_output(&["firmware at the reset vector\n"]);
}

/// A file in `folder` with this content.
fn file(folder: &Path, name: &str, content: &[u8]) -> String {
    let path = folder.join(name);
    fs::write(&path, content).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_f3_what_is_no_kernel_is_refused_with_what_was_found() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let elf = fs::read(image("memory.elf")).unwrap();
    let mut arm = elf.clone();
    arm[18..20].copy_from_slice(&183u16.to_le_bytes());
    let mut note = elf.clone();
    let name = note.windows(16).position(|bytes| bytes == *b"\x04\0\0\0\x08\0\0\0\x12\0\0\0Xen\0").unwrap();
    note[name..name + 4].fill(0xFF);
    let bzimage = fs::read(image("bzImage")).unwrap();
    for (path, parts) in [
        (at.join("none").to_str().unwrap().to_owned(), vec!["none", "No such file"]),
        (at.to_str().unwrap().to_owned(), vec!["no regular file"]),
        (file(at, "empty", b""), vec!["empty"]),
        (file(at, "text", b"#!/bin/sh\necho hello\n"), vec!["text", "vmlinux", "bzImage"]),
        (file(at, "arm64", &arm), vec!["arm64", "183", "x86-64"]),
        (file(at, "short", &elf[..elf.len() / 2]), vec!["short", "truncated"]),
        (file(at, "note", &note), vec!["note", "damaged note"]),
        (file(at, "head", &elf[..40]), vec!["head", "truncated"]),
        (file(at, "bz", &bzimage[..0x300]), vec!["bz"]),
    ] {
        let outcome = Guest::from_arguments(&["--kernel", &path]).run();
        outcome.expect_code(1).expect_error(&parts);
        assert_eq!(outcome.stdout, "");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_f7_ecam_is_reserved_in_every_size_of_memory() {
    for memory in ["512M", "4G"] {
        let outcome = Guest::new("memory").topology("nested").with(&["--memory", memory]).passes();
        outcome.expect_output(&["range e0000000-e0a00000 type 2\n"]);
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn firmware_of_an_impossible_size_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), "rom", &[0; 5000]);
    Guest::from_arguments(&["--firmware", &path]).run().expect_code(1).expect_error(&["rom", "5000", "4096", "16 MiB"]);
}
