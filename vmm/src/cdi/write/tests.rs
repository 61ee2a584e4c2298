use std::fs;

use api::config::VmConfig;

use super::*;
use crate::cdi::apply_below;
use crate::cli::{CliquesFlag, Naming};
use crate::host::fake::{DOWNSTREAM, FakeFunction, FakeHost, ROOT_PORT, UPSTREAM};

const VENDORS: [(u16, u32); 4] = [(0x10DE, 0x03_0200), (0x15B3, 0x02_0000), (0x10DE, 0x04_0300), (0x10DE, 0x0C_0330)];

/// `cards` switches, each with a GPU of `functions` functions and a NIC, all bound to vfio-pci; groups are 10, 11, ...
fn host(cards: u32, functions: usize) -> FakeHost {
    let host = FakeHost::new();
    let mut group = 10;
    let mut next = || {
        group += 1;
        Some(group - 1)
    };
    for card in 0..cards {
        let bus = 0x10 * (card + 1);
        let root = format!("pci0000:{bus:02x}/0000:{bus:02x}:01.0");
        let switch = format!("{root}/0000:{:02x}:00.0", bus + 1);
        host.add(&root, &FakeFunction { group: next(), ..FakeFunction::port(ROOT_PORT) });
        host.add(&switch, &FakeFunction { group: next(), ..FakeFunction::port(UPSTREAM) });
        for (device, (vendor, class)) in [(0, VENDORS[0]), (1, VENDORS[1])] {
            let port = format!("{switch}/0000:{:02x}:{device:02x}.0", bus + 2);
            host.add(&port, &FakeFunction { group: next(), ..FakeFunction::port(DOWNSTREAM) });
            let at = format!("{port}/0000:{:02x}:00", bus + 3 + device);
            host.add(&format!("{at}.0"), &FakeFunction { vendor, class, group: next(), ..FakeFunction::default() });
            if device == 0 {
                for function in 1..functions {
                    let class = VENDORS[1 + function.min(2)].1;
                    let more = FakeFunction { class, group: next(), ..FakeFunction::default() };
                    host.add(&format!("{at}.{function}"), &more);
                }
            }
        }
    }
    host
}

/// A recorded host.
fn recorded(host: &FakeHost) -> tempfile::NamedTempFile {
    let tree = scan_all(host.sysfs()).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), RecordedHost { tree, address_bits: 46 }.to_json().unwrap()).unwrap();
    file
}

fn options(file: &tempfile::NamedTempFile, devices: &[&str], output: &Path) -> GenerateOptions {
    GenerateOptions {
        devices: devices.iter().map(|device| device.parse().unwrap()).collect(),
        given: Vec::new(),
        output: output.to_owned(),
        format: FileFormat::Yaml,
        kinds: Vec::new(),
        names: Naming::Index,
        cliques: CliquesFlag::Auto,
        host: Some(file.path().to_owned()),
    }
}

fn output(options: GenerateOptions) -> Result<String, CdiCommandError> {
    let mut out = Vec::new();
    let command = CdiCommand::Generate(options);
    run(&CdiOptions { command }, &mut out, &mut Vec::new())?;
    Ok(String::from_utf8(out).unwrap())
}

/// What a guest gets for `devices` with the files of `folder`.
fn devices(host: &FakeHost, folder: &Path, devices: &[&str]) -> Vec<String> {
    let config = VmConfig {
        devices: devices.iter().map(|device| device.parse().unwrap()).collect(),
        cdi_dirs: vec![folder.to_owned()],
        ..VmConfig::default()
    };
    let (config, notes) = apply_below(host.sysfs(), &config).unwrap();
    assert_eq!(notes, Vec::<String>::new());
    config.devices.iter().map(ToString::to_string).collect()
}

#[test]
fn what_is_written_is_read_back_by_name_by_address_and_by_node() {
    let host = host(2, 1);
    let (file, folder) = (recorded(&host), tempfile::tempdir().unwrap());
    for format in [FileFormat::Yaml, FileFormat::Json] {
        let told = output(GenerateOptions { format, ..options(&file, &[], folder.path()) }).unwrap();
        assert_eq!(told.lines().count(), 3, "{told}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "the other format is gone");
        let gpu = "path=0000:23:00.0,clique=1,clique-any-vendor=on";
        let nic = "path=0000:24:00.0";
        for (asked, found) in [
            ("nvidia.com/pgpu=gpu1", vec![gpu]),
            ("23:00.0", vec![gpu]),
            ("/dev/vfio/19", vec![gpu]),
            ("mellanox.com/nic=nic1", vec![nic]),
            ("nvidia.com/pgpu-nic=gpu1-nic1", vec![gpu, nic]),
        ] {
            assert_eq!(devices(&host, folder.path(), &[asked]), found, "{asked}");
        }
    }
}

#[test]
fn standard_output_has_the_file_of_one_kind() {
    let file = recorded(&host(1, 1));
    let kinds = vec!["acme.com/pci".parse().unwrap()];
    let text = output(GenerateOptions { kinds, ..options(&file, &["13:00.0,id=a,clique=7"], Path::new("-")) }).unwrap();
    let expected = "# By `banyan cdi generate`.\ncdiVersion: \"0.6.0\"\nkind: \"acme.com/pci\"\ndevices:\n- name: \"a\"\n  annotations:\n    \
                    bdf: \"0000:13:00.0\"\n    clique-id: \"7\"\n    attach-pci: \"false\"\n  containerEdits:\n    deviceNodes:\n    - path: \
                    \"/dev/vfio/13\"\n";
    assert_eq!(text, expected);
    let several = output(options(&file, &[], Path::new("-"))).unwrap();
    assert_eq!(several.matches("cdiVersion").count(), 3);
    let json = output(GenerateOptions { format: FileFormat::Json, ..options(&file, &[], Path::new("-")) }).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap().as_array().map(Vec::len), Some(3));
}

#[test]
fn functions_beside_a_gpu_go_on_the_conventional_bus() {
    let host = host(8, 4);
    let (file, folder) = (recorded(&host), tempfile::tempdir().unwrap());
    output(GenerateOptions { kinds: vec!["nvidia.com/pci".parse().unwrap()], ..options(&file, &[], folder.path()) }).unwrap();
    let names: Vec<String> = (0..8)
        .map(|card| format!("nvidia.com/pci=gpu{card}"))
        .chain((0..24).map(|n| format!("nvidia.com/pci=device{n}")))
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let found = devices(&host, folder.path(), &names);
    let conventional = found.iter().filter(|device| device.contains("attach=pci")).count();
    assert_eq!((found.len(), conventional), (32, 24));
    assert!(found.iter().take(8).all(|device| device.contains(".0,clique=")), "{found:?}");
}

#[test]
fn cards_pair_with_the_nearest_network_cards_only() {
    let file = recorded(&host(2, 1));
    let text = output(options(&file, &[], Path::new("-"))).unwrap();
    assert!(text.contains("\"gpu0-nic0\"") && text.contains("\"gpu1-nic1\""), "{text}");
    assert!(!text.contains("gpu0-nic1") && !text.contains("gpu1-nic0"), "{text}");
}

#[test]
fn names_follow_address_or_group() {
    let file = recorded(&host(1, 1));
    let text = |names| output(GenerateOptions { names, ..options(&file, &["13:00.0"], Path::new("-")) }).unwrap();
    assert!(text(Naming::Address).contains("name: \"0000:13:00.0\""));
    assert!(text(Naming::Group).contains("name: \"13\""));
}

#[test]
fn what_cannot_be_written_is_refused_with_what_to_do() {
    let host = host(1, 1);
    let (file, folder) = (recorded(&host), tempfile::tempdir().unwrap());
    fs::write(
        folder.path().join("theirs.yaml"),
        "cdiVersion: 0.6.0\nkind: nvidia.com/pgpu\ndevices:\n- name: gpu0\n  containerEdits: {}\n",
    )
    .unwrap();
    for (devices, output_to, part) in [
        (&["13:00.0"][..], folder.path(), "theirs.yaml:4 names the device nvidia.com/pgpu=gpu0 already"),
        (&["77:00.0"], Path::new("-"), "no PCI function 0000:77:00.0"),
        (&["12:00.0"], Path::new("-"), "is a bridge"),
        (&["stub"], Path::new("-"), "is no function of the host"),
        (&["13:00.0,id=a", "14:00.0,id=a"], Path::new("-"), "-"),
        (&["13:00.0,id=a b"], Path::new("-"), "is no CDI name"),
    ] {
        let result = output(options(&file, devices, output_to));
        match (part, result) {
            // Names are one for each kind.
            ("-", result) => assert!(result.is_ok()),
            (part, Err(error)) => assert!(error.to_string().contains(part), "{part}: {error}"),
            (part, Ok(text)) => panic!("{part}: {text}"),
        }
    }
    let twice = GenerateOptions {
        kinds: vec!["a.com/b".parse().unwrap()],
        ..options(&file, &["13:00.0,id=a", "14:00.0,id=a"], Path::new("-"))
    };
    assert!(output(twice).unwrap_err().to_string().contains("two devices would be called a.com/b=a"));
    let bound = FakeHost::new();
    bound.add("pci0000:00/0000:00:01.0", &FakeFunction { driver: Some("nvidia"), group: None, ..FakeFunction::default() });
    let file = recorded(&bound);
    assert!(output(options(&file, &[], Path::new("-"))).unwrap_err().to_string().contains("no function of this host is bound"));
    assert!(output(options(&file, &["00:01.0"], Path::new("-"))).unwrap_err().to_string().contains("is in no IOMMU group"));
    assert!("gpux=a.com/b".parse::<crate::cli::KindFlag>().is_err() && "acme".parse::<crate::cli::KindFlag>().is_err());
}
