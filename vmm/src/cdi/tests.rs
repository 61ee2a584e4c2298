use std::fs;

use api::config::CdiMistakes;

use super::*;
use crate::host::fake::{FakeFunction, FakeHost};
use crate::spec;

/// The published examples of Kata Containers' reference architecture, typographic quotes included.
const SEED_GPU: &str = "cdiVersion: 0.4.0\nkind: nvidia.com/gpu\ndevices:\n- name: gpu0\n  annotations:\n    bdf: “41:00.0”\n    \
                        clique-id: “0”\n  containerEdits:\n    deviceNodes:\n    - path: “/dev/vfio/71\"\n";
const SEED_NIC: &str = "cdiVersion: 0.4.0\nkind: mellanox.com/nic\ndevices:\n- name: nic0\n  annotations:\n    bdf: “3d:00.0”\n    \
                        clique-id: “0”\n    attach-pci: “true”\n  containerEdits:\n    deviceNodes:\n    - path: \"/dev/vfio/66\"\n";
const SEED_NICS: &str = "cdiVersion: 0.4.0\nkind: mellanox.com/nic\ndevices:\n- name: nic0\n  annotations:\n    bdf: “3d:00.0”\n    \
                         clique-id: “0”\n    attach-pci: “true”\n  containerEdits:\n    deviceNodes:\n    - path: \"/dev/vfio/66\"\n\
                         - name: nic1\n  annotations:\n    bdf: “3d:00.1”\n    clique-id: “1”\n    attach-pci: “true”\n  \
                         containerEdits:\n    deviceNodes:\n    - path: \"/dev/vfio/67”\n";

fn dpu_host() -> FakeHost {
    let host = FakeHost::new();
    let nic = FakeFunction { vendor: 0x15B3, device: 0xA2D6, class: 0x02_0000, group: Some(66), ..FakeFunction::default() };
    host.add("pci0000:3a/0000:3a:00.0", &FakeFunction::port(host::fake::ROOT_PORT));
    host.add("pci0000:3a/0000:3a:00.0/0000:3d:00.0", &nic);
    host.add("pci0000:3a/0000:3a:00.0/0000:3d:00.1", &FakeFunction { group: Some(67), ..nic.clone() });
    host.add("pci0000:3a/0000:3a:00.0/0000:41:00.0", &FakeFunction { group: Some(71), ..FakeFunction::default() });
    host
}

fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    files.iter().for_each(|(name, text)| fs::write(directory.path().join(name), text).unwrap());
    directory
}

fn applied(host: &FakeHost, directories: &[&tempfile::TempDir], devices: &[&str]) -> Result<(Vec<String>, Notes), CdiError> {
    let config = VmConfig {
        devices: devices.iter().map(|device| device.parse().unwrap()).collect(),
        cdi_dirs: directories.iter().map(|directory| directory.path().to_owned()).collect(),
        ..VmConfig::default()
    };
    let (config, notes) = apply_below(host.sysfs(), &config)?;
    Ok((config.devices.iter().map(ToString::to_string).collect(), notes))
}

#[test]
fn the_published_pair_of_gpu_and_nic_works_as_it_stands() {
    let files = directory(&[("nvidia.yaml", SEED_GPU), ("mellanox.yaml", SEED_NIC)]);
    let names = ["nvidia.com/gpu=gpu0,id=gpu0", "mellanox.com/nic=nic0,id=nic0"];
    let (devices, notes) = applied(&dpu_host(), &[&files], &names).unwrap();
    let clique = "clique=0,clique-any-vendor=on";
    let nic = format!("path=0000:3d:00.0,id=nic0,attach=pci,{clique}");
    assert_eq!((&devices[..], &notes), (&[format!("path=0000:41:00.0,id=gpu0,{clique}"), nic][..], &Notes::new()));
    assert_eq!(applied(&dpu_host(), &[&files], &["/dev/vfio/71,id=gpu0", "3d:00.0,id=nic0"]).unwrap(), (devices, notes));
}

#[test]
fn the_published_file_of_two_nics_works_as_it_stands() {
    let files = directory(&[("mellanox.json", SEED_NICS)]);
    let (devices, notes) = applied(&dpu_host(), &[&files], &["mellanox.com/nic=nic0", "mellanox.com/nic=nic1"]).unwrap();
    let nic = |function, clique| format!("path=0000:3d:00.{function},attach=pci,clique={clique},clique-any-vendor=on");
    assert_eq!((devices, notes), (vec![nic(0, 0), nic(1, 1)], Notes::new()));
}

#[test]
fn the_sample_files_are_read_without_a_remark() {
    let samples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../resources/cdi");
    let library = Library::load(&[samples], true, CdiMistakes::Refuse).unwrap();
    let names: Vec<String> = library.entries.iter().map(|entry| entry.name.to_string()).collect();
    assert_eq!(names, ["mellanox.com/nic=nic0", "mellanox.com/nic=nic1", "nvidia.com/gpu=gpu0", "nvidia.com/gpu=pair0"]);
    assert_eq!(library.notes(), Vec::<String>::new());
}

#[test]
fn the_later_directory_wins_and_files_of_one_directory_are_equals() {
    let other = SEED_GPU.replace("“0”", "“5”");
    let (first, second) = (directory(&[("a.yaml", SEED_GPU)]), directory(&[("z.json", &other)]));
    let (devices, notes) = applied(&dpu_host(), &[&first, &second], &["nvidia.com/gpu=gpu0"]).unwrap();
    assert_eq!((devices[0].contains("clique=5"), notes), (true, Notes::new()));
    let both = directory(&[("a.yaml", SEED_GPU), ("b.yaml", &other)]);
    let error = applied(&dpu_host(), &[&both], &["nvidia.com/gpu=gpu0"]).unwrap_err().to_string();
    assert!(error.contains("a.yaml:4 and") && error.contains("b.yaml:4; remove one"), "{error}");
    let (_, notes) = applied(&dpu_host(), &[&both], &["3d:00.0"]).unwrap();
    assert!(notes[0].contains("two CDI files name the device nvidia.com/gpu=gpu0"), "{notes:?}");
}

#[test]
fn a_file_that_cannot_be_read_costs_a_note_and_is_named_when_a_device_is_missing() {
    let files = directory(&[("bad.yaml", "cdiVersion: [\n"), ("new.json", "{\"cdiVersion\": \"9.0.0\"}"), ("no.txt", "x")]);
    fs::write(files.path().join("binary.json"), [0xFF, 0xFE, 0]).unwrap();
    fs::write(files.path().join("large.yaml"), vec![b' '; (1 << 20) + 1]).unwrap();
    fs::create_dir(files.path().join("folder.yaml")).unwrap();
    let (devices, notes) = applied(&dpu_host(), &[&files], &["41:00.0"]).unwrap();
    assert_eq!((devices.len(), notes.len()), (1, 5), "{notes:?}");
    let error = applied(&dpu_host(), &[&files], &["nvidia.com/gpu=gpu0"]).unwrap_err().to_string();
    for part in
        ["bad.yaml:", "new.json:1: key `cdiVersion`: version `9.0.0`", "more than 1 MiB", "no regular file", "binary.json"]
    {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn a_file_that_cannot_be_understood_keeps_the_devices_that_it_names_from_starting_anywhere() {
    let new = SEED_GPU.replace("0.4.0", "9.0.0");
    let by_node = new.replace("bdf: “41:00.0”", "x: y");
    let broken = format!("{SEED_GPU}]\n");
    for text in [&new, &by_node, &broken] {
        let files = directory(&[("gpu.yaml", text)]);
        for device in ["41:00.0", "/dev/vfio/71"] {
            let error = applied(&dpu_host(), &[&files], &[device]).unwrap_err().to_string();
            assert!(error.contains("gpu.yaml:") && error.contains("the file names 0000:41:00.0"), "{text} {device}: {error}");
        }
        let (devices, notes) = applied(&dpu_host(), &[&files], &["3d:00.0"]).unwrap();
        assert_eq!((&devices[..], notes.len()), (&["path=0000:3d:00.0".to_owned()][..], 1), "{text}");
    }
}

#[test]
fn a_directory_that_is_named_must_exist() {
    let config =
        VmConfig { devices: vec!["41:00.0".parse().unwrap()], cdi_dirs: vec!["/nonexistent/cdi".into()], ..VmConfig::default() };
    let error = apply_below(dpu_host().sysfs(), &config).unwrap_err().to_string();
    assert!(error.contains("cannot read the directory /nonexistent/cdi"), "{error}");
}

/// What the shipped policy for Kata Containers makes of `devices`, with its two directories below `root`.
fn by_the_shipped_policy(root: &Path, devices: &[&str]) -> Result<(Vec<String>, Notes), CdiError> {
    let mut policy = api::config::Policy::parse("config.toml", include_str!("../../../resources/kata/config.toml")).unwrap();
    let usual: Vec<PathBuf> = load::DIRECTORIES.iter().map(PathBuf::from).collect();
    assert_eq!(policy.cdi_dirs, usual);
    policy.cdi_dirs.iter_mut().for_each(|path| *path = root.join(path.strip_prefix("/").unwrap()));
    let devices = devices.iter().map(|device| device.parse().unwrap()).collect();
    let (config, notes) = apply_below(dpu_host().sysfs(), &VmConfig { devices, ..policy.base() })?;
    Ok((config.devices.iter().map(ToString::to_string).collect(), notes))
}

#[test]
fn a_policys_directories_need_not_exist_and_what_is_wrong_in_them_costs_a_warning() {
    let root = tempfile::tempdir().unwrap();
    let (gpu, plain) = (["41:00.0,id=vfio-1"], vec!["path=0000:41:00.0,id=vfio-1".to_owned()]);
    assert_eq!(by_the_shipped_policy(root.path(), &gpu).unwrap(), (plain.clone(), Notes::new()));

    let directory = root.path().join("etc/cdi");
    fs::create_dir_all(&directory).unwrap();
    let write = |name: &str, text: &str| fs::write(directory.join(name), text).unwrap();
    write("broken.yaml", &format!("{SEED_GPU}]\n"));
    let (devices, notes) = by_the_shipped_policy(root.path(), &gpu).unwrap();
    assert_eq!((&devices, notes.len()), (&plain, 1), "{notes:?}");
    assert!(notes[0].contains("broken.yaml:") && notes[0].ends_with("the devices of this file are not known"), "{notes:?}");
    let error = by_the_shipped_policy(root.path(), &["nvidia.com/gpu=gpu0"]).unwrap_err().to_string();
    assert!(error.contains("no CDI file names the device nvidia.com/gpu=gpu0") && error.contains("broken.yaml"), "{error}");

    write("broken.yaml", SEED_GPU);
    write("other.yaml", &SEED_GPU.replace("“0”", "“5”"));
    let (devices, notes) = by_the_shipped_policy(root.path(), &gpu).unwrap();
    assert_eq!((&devices, notes.len()), (&plain, 1), "{notes:?}");
    assert!(notes[0].ends_with("; what they say is not followed"), "{notes:?}");
    let error = by_the_shipped_policy(root.path(), &["nvidia.com/gpu=gpu0"]).unwrap_err().to_string();
    assert!(error.contains("two CDI files name the device"), "{error}");

    // Two devices with names of their own that say different things of one function.
    write("other.yaml", &SEED_GPU.replace("“0”", "“5”").replace("gpu0", "gpu1"));
    let error = by_the_shipped_policy(root.path(), &gpu).unwrap_err().to_string();
    assert!(error.contains("disagree on `clique-id`") && error.contains("other.yaml"), "{error}");
    fs::remove_dir_all(&directory).unwrap();
    fs::write(&directory, "a file in the place of a directory").unwrap();
    let (devices, notes) = by_the_shipped_policy(root.path(), &gpu).unwrap();
    assert_eq!((devices, notes.len()), (plain, 1), "{notes:?}");
}

#[test]
fn devices_of_a_topology_file_may_have_cdi_names_and_stubs_need_no_files() {
    let files = directory(&[("nvidia.yaml", SEED_GPU)]);
    let text = "[[root-complex]]\nname = \"rc\"\n[[device]]\nname = \"gpu\"\non = \"rc\"\ncdi = \"nvidia.com/gpu=gpu0\"\n";
    let topology = api::config::TopologyConfig::parse("t.toml", text).unwrap();
    let config = VmConfig { topology: Some(topology), cdi_dirs: vec![files.path().to_owned()], ..VmConfig::default() };
    let (config, _) = apply_below(dpu_host().sysfs(), &config).unwrap();
    let names = spec::names(&config);
    assert_eq!(names[0].1.to_string(), "path=0000:41:00.0,id=gpu,on=rc,clique=0,clique-any-vendor=on");
    let stub = VmConfig { devices: vec!["stub".parse().unwrap()], cdi_dirs: vec!["/nonexistent".into()], ..VmConfig::default() };
    assert!(apply_below(dpu_host().sysfs(), &stub).is_ok());
}

#[test]
fn a_recorded_host_stands_for_this_one() {
    let host = dpu_host();
    let addresses = ["3d:00.0", "3d:00.1", "41:00.0"].map(|at| at.parse().unwrap());
    let tree = host::scan::scan(host.sysfs(), &addresses).unwrap();
    let files = directory(&[("nvidia.yaml", SEED_GPU)]);
    let mut config = VmConfig { devices: vec!["nvidia.com/gpu=gpu0".parse().unwrap()], ..VmConfig::default() };
    assert!(apply_in(&tree, &config).unwrap_err().to_string().contains("named are: none"));
    config.cdi_dirs = vec![files.path().to_owned()];
    let (config, _) = apply_in(&tree, &config).unwrap();
    assert_eq!(config.devices[0].to_string(), "path=0000:41:00.0,clique=0,clique-any-vendor=on");
}
