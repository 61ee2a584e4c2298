use std::os::fd::AsFd;

use devices::complaints::chain;

use super::*;

fn image(bytes: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(bytes).unwrap();
    file
}

fn open(text: &str) -> Result<Image, String> {
    let disk: DiskConfig = text.parse().unwrap();
    let DiskSource::Image(image) = &disk.source else { panic!("{text} is no image") };
    open_disk(&disk, image).map_err(|error| chain(&error))
}

#[test]
fn a_disk_that_is_written_belongs_to_one_and_one_that_is_read_to_many() {
    let file = image(4096);
    let path = file.path().display();
    let written = open(&format!("{path}")).unwrap();
    let busy = open(&format!("{path}")).err().unwrap();
    assert!(busy.contains("in use by another process") && busy.contains("readonly=on"), "{busy}");
    assert!(open(&format!("{path},readonly=on")).err().unwrap().contains("in use"));
    drop(written);
    let _readers = [open(&format!("{path},readonly=on")).unwrap(), open(&format!("{path},readonly=on")).unwrap()];
    assert!(open(&format!("{path}")).err().unwrap().contains("in use"));
}

#[test]
#[cfg_attr(without_taps, ignore = "needs /dev/net/tun and the right to make interfaces")]
fn a_tap_is_for_one_interface_whether_it_comes_by_name_or_as_descriptors() {
    let queues = |name: &str, count| Tap::open(name, count).unwrap();
    let pass = |taps: &[&Tap]| {
        let taps = taps.iter().map(|tap| tap.as_fd().try_clone_to_owned().unwrap()).collect();
        Backend::of_taps(&"t0".parse().unwrap(), taps)
    };
    let passed = |taps: &[&Tap]| pass(taps).unwrap();
    let tap = |letter: char| format!("bt{letter}{}", std::process::id());
    let (single, several, other) = (queues(&tap('a'), 1), queues(&tap('b'), 3), queues(&tap('c'), 1));
    let (eth, net1) = (Name::from("eth"), Name::from("net1"));
    let second = |first: &[&Tap], then: &[&Tap]| {
        let backends = Backends::default();
        backends.put(&eth, passed(first)).unwrap();
        backends.put(&net1, passed(then)).map_err(|error| error.to_string())
    };
    let text = |letter| format!("the network interfaces eth and net1 are both on the tap {}", tap(letter));
    assert!(second(&[&single[0]], &[&single[0]]).unwrap_err().contains(&text('a')));
    assert!(second(&[&several[0], &several[1]], &[&several[2]]).unwrap_err().contains(&text('b')));
    assert_eq!(second(&[&several[0], &several[1]], &[&other[0]]), Ok(()), "two queues of one interface share its tap");
    let refused = |taps: &[&Tap]| pass(taps).err().unwrap().to_string();
    let twice = refused(&[&several[0], &several[1], &several[0]]);
    assert!(twice.contains(&format!("one queue of the tap {}", tap('b'))), "{twice}");
    let mixed = refused(&[&several[0], &other[0]]);
    assert!(mixed.contains(&format!("of the taps {} and {}", tap('b'), tap('c'))), "{mixed}");
    let backends = Backends::default();
    backends.put(&eth, passed(&[&single[0]])).unwrap();
    let named = Virtio::Net(tap('a').parse().unwrap());
    let error = backends.get("net1", &named).err().unwrap().to_string();
    assert!(error.contains(&text('a')), "{error}");
    backends.close(&eth);
    backends.put(&net1, passed(&[&single[0]])).unwrap();
}

#[test]
fn a_disk_that_is_missing_truncated_or_not_what_it_is_called_is_named_with_the_reason() {
    let (small, raw) = (image(511), image(8192));
    let cases = [
        ("/nonexistent/root.img".to_owned(), "cannot open the disk /nonexistent/root.img"),
        ("/".to_owned(), "no regular file or block device"),
        ("/dev/null".to_owned(), "no regular file or block device"),
        (small.path().display().to_string(), "it has 511 bytes"),
        (format!("{},format=qcow2", raw.path().display()), "it is no qcow2 image"),
    ];
    for (text, expected) in cases {
        let error = open(&text).err().unwrap();
        assert!(error.contains(expected), "{error}");
    }
}
