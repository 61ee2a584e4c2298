//! A bounded run of what the fuzz target `config` does without end.

mod texts;

use proptest::prelude::*;

/// Pieces of what people write, so that some of it means something.
const PIECES: &[&str] = &[
    "stub",
    "0000:03:00.0",
    "vendor.com/gpu=0",
    "/dev/vfio/9",
    "id=",
    "on=",
    "device=",
    "function=",
    "clique=",
    "bar0=",
    "bar2=",
    "64K:mem32",
    "1G:mem64:prefetchable",
    "msix=",
    "msi=",
    "intx=",
    "A",
    "dma=",
    "on",
    "off",
    "link=",
    "16GT/s x8",
    "ids=",
    "10de:20b8",
    "class=",
    "030200",
    "attach=",
    "pci",
    "root-ports=",
    "switch-ports=",
    "hotplug-mem=",
    "removal=",
    "button",
    "cf8=",
    "auto",
    "size=",
    "512M",
    "4T",
    "prefault=",
    "shared=",
    "hugepages=",
    "path=",
    "a.img",
    "readonly=",
    "socket=",
    "/s",
    "tag=",
    "cid=",
    "3",
    "mac=",
    "tap=",
    "t0",
    "02:00:00:00:00:01",
    "count=",
    "0-3",
    ",",
    ",",
    ",",
    "=",
    ":",
    "0",
    "1",
    "7",
    "16",
    "255",
    "4294967296",
    "-1",
    "x",
    " ",
    "\"",
    "[",
    "]",
    "{",
    "}",
    "[[device]]\n",
    "[[port]]\n",
    "[[root-complex]]\n",
    "name = ",
    "kind = ",
    "\n",
    "banyan",
    "payload",
    "kernel",
    "memory",
    "null",
];

fn any_text() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        12 => prop::sample::select(PIECES).prop_map(|piece| piece.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..4),
    ];
    (any::<u8>(), prop::collection::vec(piece, 0..24)).prop_map(|(kind, pieces)| {
        let mut bytes = vec![kind];
        bytes.extend(pieces.concat());
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn no_text_panics_and_what_is_shown_means_the_same(bytes in any_text()) {
        texts::read(&bytes);
    }
}
