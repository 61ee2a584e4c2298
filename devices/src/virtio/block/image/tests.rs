use super::*;
use std::io::Write;
use vm_memory::{Bytes, VolatileMemory};

type MmapRegion = vm_memory::MmapRegion<()>;

fn image(content: &[u8]) -> Image {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    raw(file)
}

fn raw(file: File) -> Image {
    let (read, written) = Default::default();
    Image { content: Content::Raw { file, direct: false }, len: 0, block: SECTOR, readonly: false, read, written }
}

fn file(image: &Image) -> &File {
    match &image.content {
        Content::Raw { file, .. } => file,
        Content::Qcow2(_) => unreachable!("a raw image"),
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n % 253).try_into().unwrap()).collect()
}

fn content(memory: &MmapRegion, at: usize, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    memory.get_slice(at, len).unwrap().read_slice(&mut data, 0).unwrap();
    data
}

#[test]
fn scattered_slices_are_filled_in_order() {
    let memory = MmapRegion::new(1 << 20).unwrap();
    let image = image(&pattern(8192));
    let slices: Vec<_> =
        [(0, 100), (5000, 0), (7000, 1), (9000, 411)].map(|(at, len)| memory.get_slice(at, len).unwrap()).into_iter().collect();
    image.transfer(Direction::Read, &slices, 512, || false).unwrap();
    let got = [content(&memory, 0, 100), content(&memory, 7000, 1), content(&memory, 9000, 411)].concat();
    assert_eq!(got, pattern(8192)[512..1024]);
}

#[test]
fn more_slices_than_one_call_takes_are_all_moved() {
    let memory = MmapRegion::new(1 << 20).unwrap();
    let image = image(&pattern(1 << 20));
    let empty = (0..2000).map(|n| (n, 0));
    let slices = empty.chain((0..3000).map(|n| (n * 100, 100)));
    let slices: Vec<_> = slices.map(|(at, len)| memory.get_slice(at, len).unwrap()).collect();
    image.transfer(Direction::Read, &slices, 0, || false).unwrap();
    assert!(content(&memory, 0, 300_000) == pattern(300_000));
}

#[test]
fn large_slices_are_moved_in_pieces() {
    let memory = MmapRegion::new(40 << 20).unwrap();
    let image = image(&[]);
    file(&image).set_len(40 << 20).unwrap();
    memory.get_slice(35 << 20, 4).unwrap().write_slice(b"here", 0).unwrap();
    let calls = std::cell::Cell::new(0);
    let count = || {
        calls.set(calls.get() + 1);
        false
    };
    image.transfer(Direction::Write, &[memory.get_slice(0, 40 << 20).unwrap()], 0, count).unwrap();
    assert_eq!(calls.get(), 3);
    let back = MmapRegion::new(4096).unwrap();
    image.transfer(Direction::Read, &[back.get_slice(0, 4).unwrap()], 35 << 20, || false).unwrap();
    assert_eq!(content(&back, 0, 4), b"here");
}

#[test]
fn a_shrunk_image_is_an_error() {
    let memory = MmapRegion::new(4096).unwrap();
    let image = image(&pattern(1024));
    file(&image).set_len(600).unwrap();
    let error = image.transfer(Direction::Read, &[memory.get_slice(0, 512).unwrap()], 512, || false).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn a_stop_ends_a_transfer() {
    let memory = MmapRegion::new(4096).unwrap();
    let error = image(&pattern(4096)).transfer(Direction::Read, &[memory.as_volatile_slice()], 0, || true).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Interrupted);
}

#[test]
fn memory_that_is_not_aligned_goes_by_way_of_memory_that_is() {
    let memory = MmapRegion::new(1 << 20).unwrap();
    let Image { content: Content::Raw { file, .. }, .. } = image(&pattern(8192)) else { unreachable!() };
    let slices = [(1, 100), (5003, 7), (9001, 405)].map(|(at, len)| memory.get_slice(at, len).unwrap());
    bounced(&file, Direction::Read, &slices, 512, || false).unwrap();
    let got = [content(&memory, 1, 100), content(&memory, 5003, 7), content(&memory, 9001, 405)].concat();
    assert_eq!(got, pattern(8192)[512..1024]);
    bounced(&file, Direction::Write, &slices, 4096, || false).unwrap();
    let back = MmapRegion::new(4096).unwrap();
    transfer(&file, Direction::Read, &[back.get_slice(0, 512).unwrap()], 4096, || false).unwrap();
    assert_eq!(content(&back, 0, 512), pattern(8192)[512..1024]);
}

#[test]
fn zeros_are_written_and_space_is_given_back() {
    let image = image(&[0xFF; 16384]);
    image.write_zeroes(512, 1024, false, || false).unwrap();
    image.discard(8192, 4096, || false).unwrap();
    let memory = MmapRegion::new(16384).unwrap();
    image.transfer(Direction::Read, &[memory.get_slice(0, 16384).unwrap()], 0, || false).unwrap();
    assert_eq!(content(&memory, 0, 512), [0xFF; 512]);
    assert_eq!(content(&memory, 512, 1024), [0; 1024]);
    assert_eq!(content(&memory, 1536, 512), [0xFF; 512]);
    assert_eq!(content(&memory, 12288, 4096), [0xFF; 4096]);
}

/// An empty qcow2 image of `len` bytes.
fn qcow2(len: u64) -> File {
    use imago::FormatCreateBuilder;
    let file = tempfile::tempfile().unwrap();
    let storage = imago::file::File::try_from(file.try_clone().unwrap()).unwrap();
    Qcow2::<imago::file::File>::create_builder(storage).size(len).create().unwrap();
    file
}

#[test]
fn a_qcow2_image_keeps_what_is_written() {
    let file = qcow2(1 << 20);
    let again = file.try_clone().unwrap();
    let memory = MmapRegion::new(8192).unwrap();
    memory.get_slice(0, 4096).unwrap().write_slice(&pattern(4096), 0).unwrap();
    {
        let image = Image::new(file, Format::Qcow2, Opened::default()).unwrap();
        assert_eq!(image.size(), 1 << 20);
        image.transfer(Direction::Write, &[memory.get_slice(0, 4096).unwrap()], 65536, || false).unwrap();
        image.write_zeroes(65536 + 512, 512, true, || false).unwrap();
        image.flush().unwrap();
    }
    let image = Image::new(again, Format::Qcow2, Opened { readonly: true, ..Opened::default() }).unwrap();
    image.transfer(Direction::Read, &[memory.get_slice(4096, 4096).unwrap()], 65536, || false).unwrap();
    let mut expected = pattern(4096);
    expected[512..1024].fill(0);
    assert!(content(&memory, 4096, 4096) == expected);
    image.transfer(Direction::Read, &[memory.get_slice(0, 4096).unwrap()], 0, || false).unwrap();
    assert!(content(&memory, 0, 4096) == [0; 4096]);
}

#[test]
fn large_discards_and_zeros_end_when_they_are_stopped() {
    use std::cell::Cell;
    const LEN: u64 = 2 << 30;
    let raw = tempfile::tempfile().unwrap();
    raw.set_len(LEN).unwrap();
    for (file, format) in [(raw, Format::Raw), (qcow2(LEN), Format::Qcow2)] {
        let image = Image::new(file, format, Opened::default()).unwrap();
        type Call = fn(&Image, &dyn Fn() -> bool) -> io::Result<()>;
        let calls: [Call; 3] = [
            |image, stopped| image.discard(0, LEN, stopped),
            |image, stopped| image.write_zeroes(0, LEN, true, stopped),
            |image, stopped| image.write_zeroes(0, LEN, false, stopped),
        ];
        for call in calls {
            let asked = Cell::new(0);
            let after_three = || {
                asked.set(asked.get() + 1);
                asked.get() > 3
            };
            assert_eq!(call(&image, &after_three).unwrap_err().kind(), io::ErrorKind::Interrupted);
            assert_eq!(asked.get(), 4);
            call(&image, &|| false).unwrap();
        }
    }
}

#[test]
fn the_format_is_what_the_user_says_and_never_looked_for() {
    let file = qcow2(1 << 20);
    let raw = Image::new(file.try_clone().unwrap(), Format::Raw, Opened::default()).unwrap();
    assert!(raw.size() != 1 << 20);
    let mut noise = tempfile::tempfile().unwrap();
    noise.write_all(&pattern(8192)).unwrap();
    assert!(matches!(Image::new(noise, Format::Qcow2, Opened::default()), Err(ImageError::Qcow2(_))));
}

#[test]
fn a_qcow2_image_that_names_another_file_is_refused() {
    use std::os::unix::fs::FileExt;
    let file = qcow2(1 << 20);
    let name = b"/etc/hostname";
    // Where the name of the backing file is, and its length (docs/interop/qcow2.txt of QEMU).
    file.write_all_at(name, 0x200).unwrap();
    file.write_all_at(&0x200_u64.to_be_bytes(), 8).unwrap();
    file.write_all_at(&u32::try_from(name.len()).unwrap().to_be_bytes(), 16).unwrap();
    let error = Image::new(file, Format::Qcow2, Opened { readonly: true, ..Opened::default() }).err().unwrap();
    assert!(error.to_string().contains("are not opened"), "{error}");
}

#[test]
fn an_encrypted_qcow2_image_is_refused_and_never_taken_for_a_plain_one() {
    use std::os::unix::fs::FileExt;
    for (method, name) in [(1_u32, "AES"), (2, "LUKS"), (9, "method 9)"), (u32::MAX, "4294967295")] {
        let file = qcow2(1 << 20);
        file.write_all_at(&method.to_be_bytes(), 32).unwrap();
        for readonly in [true, false] {
            let error = Image::new(file.try_clone().unwrap(), Format::Qcow2, Opened { readonly, ..Opened::default() })
                .err()
                .unwrap()
                .to_string();
            assert!(error.contains("encrypted") && error.contains(name), "{error}");
        }
    }
}

#[test]
fn what_is_no_disk_is_refused() {
    let small = tempfile::tempfile().unwrap();
    small.set_len(511).unwrap();
    assert!(matches!(Image::new(small, Format::Raw, Opened::default()), Err(ImageError::Small { len: 511, block: 512 })));
    let folder = File::open("/").unwrap();
    assert!(matches!(Image::new(folder, Format::Raw, Opened { readonly: true, ..Opened::default() }), Err(ImageError::Kind)));
}

#[test]
fn an_image_that_was_opened_without_waiting_is_read_and_written_by_calls_that_wait() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, [7; 4096]).unwrap();
    let mut options = File::options();
    std::os::unix::fs::OpenOptionsExt::custom_flags(options.read(true).write(true), libc::O_NONBLOCK);
    let image = Image::new(options.open(&path).unwrap(), Format::Raw, Opened::default()).unwrap();
    assert!(!fcntl_getfl(image.raw().unwrap()).unwrap().contains(OFlags::NONBLOCK));
}
