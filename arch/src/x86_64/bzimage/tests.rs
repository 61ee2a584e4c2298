use super::*;

/// The start of a relocatable bzImage like those that Linux 6.x builds: 16 MiB preferred, 2 MiB aligned.
pub(in crate::x86_64) fn image() -> Vec<u8> {
    let mut image = vec![0xCC; 0x400];
    put(&mut image, at::SETUP_SECTS, &[3]);
    put(&mut image, at::SYSSIZE, &0x100u32.to_le_bytes());
    put(&mut image, at::BOOT_FLAG, &[0x55, 0xAA, 0xEB, 0x6A]);
    put(&mut image, at::MAGIC, b"HdrS");
    put(&mut image, at::VERSION, &0x020Fu16.to_le_bytes());
    put(&mut image, at::LOADFLAGS, &[1]);
    put(&mut image, at::INITRD_ADDR_MAX, &0x7FFF_FFFFu32.to_le_bytes());
    put(&mut image, at::KERNEL_ALIGNMENT, &0x20_0000u32.to_le_bytes());
    put(&mut image, at::RELOCATABLE, &[1]);
    put(&mut image, at::XLOADFLAGS, &0x7Fu16.to_le_bytes());
    put(&mut image, at::CMDLINE_SIZE, &2047u32.to_le_bytes());
    put(&mut image, at::PREF_ADDRESS, &0x100_0000u64.to_le_bytes());
    put(&mut image, at::INIT_SIZE, &0x300_0000u32.to_le_bytes());
    image
}

const FILE_LEN: u64 = 0x800 + 0x1000;

fn changed(offset: usize, bytes: &[u8]) -> Result<SetupHeader, BzImageError> {
    let mut image = image();
    put(&mut image, offset, bytes);
    SetupHeader::parse(&image)
}

#[test]
fn a_bzimage_goes_where_it_prefers_and_is_entered_512_bytes_later() {
    let header = SetupHeader::parse(&image()).unwrap();
    assert_eq!(
        header.place(FILE_LEN, None).unwrap(),
        Placement {
            file_offset: 0x800,
            load: 0x100_0000,
            entry: 0x100_0200,
            memory: Range { start: 0x100_0000, end: 0x400_0000 },
        }
    );
    assert_eq!((header.initrd_addr_max(), header.cmdline_max()), (0x7FFF_FFFF, 2047));
}

#[test]
fn case_f4_a_requested_load_address_moves_the_entry_point_along() {
    let header = SetupHeader::parse(&image()).unwrap();
    let placed = header.place(FILE_LEN, Some(0x400_0000)).unwrap();
    assert_eq!((placed.load, placed.entry), (0x400_0000, 0x400_0200));
    assert_eq!(placed.memory, Range { start: 0x400_0000, end: 0x700_0000 });
}

#[test]
fn case_f4_a_load_address_that_cannot_be_honoured_is_refused_with_the_reason() {
    let header = SetupHeader::parse(&image()).unwrap();
    assert_eq!(
        header.place(FILE_LEN, Some(0x410_0000)).unwrap_err().to_string(),
        "load address 0x4100000 is not a multiple of the kernel's alignment 0x200000"
    );
    assert!(matches!(header.place(FILE_LEN, Some(0)), Err(BzImageError::OutOfReach { .. })));
    assert!(matches!(header.place(FILE_LEN, Some(0x7FE0_0000)), Err(BzImageError::OutOfReach { .. })));
    let fixed = changed(at::RELOCATABLE, &[0]).unwrap();
    assert!(fixed.place(FILE_LEN, Some(0x100_0000)).is_ok());
    assert_eq!(
        fixed.place(FILE_LEN, Some(0x400_0000)).unwrap_err().to_string(),
        "the kernel is not relocatable: it cannot be at 0x4000000, only at 0x1000000"
    );
}

#[test]
fn what_is_no_64_bit_bzimage_is_refused_with_the_reason() {
    assert!(matches!(SetupHeader::parse(&[]), Err(BzImageError::NoHeader)));
    assert!(matches!(SetupHeader::parse(&[b'x'; 0x1000]), Err(BzImageError::NoHeader)));
    assert!(matches!(changed(at::MAGIC, b"hdrs"), Err(BzImageError::NoHeader)));
    assert_eq!(
        changed(at::VERSION, &[9, 2]).unwrap_err().to_string(),
        "boot protocol 2.09 is too old: 2.12 or later is needed, that is Linux 3.8 or later"
    );
    assert!(matches!(changed(at::LOADFLAGS, &[0]), Err(BzImageError::LoadedLow)));
    assert!(matches!(changed(at::XLOADFLAGS, &[2, 0]), Err(BzImageError::No64BitEntry)));
    assert!(matches!(changed(at::JUMP_LEN, &[0x20]), Err(BzImageError::ShortHeader { end: 0x222 })));
    assert!(matches!(changed(at::JUMP_LEN, &[0xFF]), Ok(header) if header.end == HEADER_END));
}

#[test]
fn a_truncated_bzimage_is_refused_wherever_it_ends() {
    let image = image();
    for len in 0..0x26C {
        assert!(SetupHeader::parse(&image[..len]).is_err(), "{len}");
    }
    let header = SetupHeader::parse(&image).unwrap();
    for len in [0, 0x800, 0x801, FILE_LEN - 1] {
        assert_eq!(header.place(len, None), Err(BzImageError::FileTooShort { file_len: len, needed: FILE_LEN }));
    }
}

#[test]
fn no_setup_sectors_mean_four() {
    let header = changed(at::SETUP_SECTS, &[0]).unwrap();
    assert_eq!(header.place(0x10_0000, None).unwrap().file_offset, 5 * 512);
}

#[test]
fn memory_covers_the_file_even_if_init_size_is_too_small() {
    let header = changed(at::INIT_SIZE, &[0; 4]).unwrap();
    assert_eq!(header.place(FILE_LEN, None).unwrap().memory.len(), 0x1000);
}
