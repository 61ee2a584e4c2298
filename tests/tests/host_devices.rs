//! Devices of a host that does not exist: a folder in the place of /sys. What is refused before any device is opened.
#![expect(clippy::unwrap_used, reason = "helpers of tests end a test that cannot go on")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use tests::{Capabilities, Outcome, with_other_mounts};

/// Type of a PCI Express function (PCIe 6.0 7.5.3.2).
const ENDPOINT: u8 = 0;
const ROOT_PORT: u8 = 4;

/// Adds the function at the end of `path`, below `/sys/devices`.
fn add(sys: &Path, path: &str, class: u32, express: u8, group: u32, driver: Option<&str>) {
    let folder = sys.join("devices").join(path);
    let name = path.rsplit('/').next().unwrap();
    fs::create_dir_all(&folder).unwrap();
    let mut config = vec![0; 4096];
    config[..4].copy_from_slice(&[0xDE, 0x10, 0xB8, 0x20]);
    (config[6], config[0x34]) = (0x10, 0x40);
    config[0x0E] = u8::from(express == ROOT_PORT);
    config[0x40..0x44].copy_from_slice(&[0x10, 0, express << 4 | 2, 0]);
    config[0x4C..0x4E].copy_from_slice(&[4, 1]);
    config[0x52..0x54].copy_from_slice(&[0x04, 1]);
    fs::write(folder.join("config"), config).unwrap();
    for (attribute, text) in [
        ("vendor", "0x10de"),
        ("device", "0x20b8"),
        ("class", &format!("{class:#08x}")),
        ("revision", "0xa1"),
        ("subsystem_vendor", "0x10de"),
        ("subsystem_device", "0x1463"),
        ("numa_node", "0"),
        ("resource", "0x0 0x0 0x0\n"),
    ] {
        fs::write(folder.join(attribute), format!("{text}\n")).unwrap();
    }
    let link = |from: &str, to: &str| {
        let from = sys.join(from);
        fs::create_dir_all(from.parent().unwrap()).unwrap();
        symlink(to, from).unwrap();
    };
    let here = format!("/sys/devices/{path}");
    link(&format!("bus/pci/devices/{name}"), &here);
    link(&format!("kernel/iommu_groups/{group}/devices/{name}"), &here);
    symlink(format!("/sys/kernel/iommu_groups/{group}"), folder.join("iommu_group")).unwrap();
    if let Some(driver) = driver {
        fs::create_dir_all(sys.join("bus/pci/drivers").join(driver)).unwrap();
        symlink(format!("/sys/bus/pci/drivers/{driver}"), folder.join("driver")).unwrap();
    }
}

/// Plans a guest with `devices` on a host with a GPU of two functions, a NIC and a disk behind root ports.
fn plan(capabilities: Capabilities, prepare: &str, arguments: &[&str], devices: &[&str]) -> Outcome {
    let flags = devices.iter().flat_map(|device| ["--device", device]);
    let arguments: Vec<&str> = ["run", "--dry-run"].into_iter().chain(arguments.iter().copied()).chain(flags).collect();
    on_host(capabilities, prepare, &arguments)
}

/// Runs Banyan on that host.
fn on_host(capabilities: Capabilities, prepare: &str, arguments: &[&str]) -> Outcome {
    let sys = tempfile::tempdir().unwrap();
    let add = |path, class, express, group, driver| add(sys.path(), path, class, express, group, driver);
    add("pci0000:00/0000:00:01.0", 0x06_0400, ROOT_PORT, 1, Some("pcieport"));
    add("pci0000:00/0000:00:01.0/0000:01:00.0", 0x03_0200, ENDPOINT, 10, Some("vfio-pci"));
    add("pci0000:00/0000:00:01.0/0000:01:00.1", 0x04_0300, ENDPOINT, 10, Some("vfio-pci"));
    add("pci0000:00/0000:00:02.0", 0x06_0400, ROOT_PORT, 2, Some("pcieport"));
    add("pci0000:00/0000:00:02.0/0000:02:00.0", 0x02_0000, ENDPOINT, 20, Some("mlx5_core"));
    add("pci0000:00/0000:00:03.0", 0x06_0400, ROOT_PORT, 3, Some("pcieport"));
    add("pci0000:00/0000:00:03.0/0000:03:00.0", 0x01_0802, ENDPOINT, 30, Some("vfio-pci"));
    add("pci0000:00/0000:00:03.0/0000:03:00.1", 0x01_0802, ENDPOINT, 30, Some("nvme"));
    let prepare = format!("mount --bind '{}' /sys && {prepare}", sys.path().display());
    with_other_mounts(&prepare, capabilities, arguments)
}

#[test]
#[cfg_attr(without_namespaces, ignore = "needs user namespaces")]
fn devices_that_are_free_are_planned_in_the_shape_of_the_host() {
    let outcome = plan(Capabilities::All, "true", &["--pcie", "topology=host"], &["01:00.0,id=gpu", "01:00.1,id=sound"]);
    outcome.expect_code(0).expect_output(&["-[0000:00]-", "[01]--", "00.0  gpu 10de:20b8", "00.1  sound 10de:20b8"]);
}

#[test]
#[cfg_attr(without_namespaces, ignore = "needs user namespaces")]
fn devices_that_cannot_be_had_are_refused_with_what_to_do() {
    let by_link = "/sys/bus/pci/devices/0000:01:00.0,id=a";
    let by_folder = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/,id=b";
    for (devices, parts) in [
        (vec!["04:00.0,id=x"], vec!["device x", "no PCI function 0000:04:00.0", "lspci"]),
        (vec!["00:01.0,id=x"], vec!["device x", "0000:00:01.0 is a bridge"]),
        (vec!["02:00.0,id=nic"], vec!["device nic", "bound to mlx5_core, not to vfio-pci", "driver_override", "unbind"]),
        (vec!["03:00.0,id=disk"], vec!["device disk", "IOMMU group 30 is not viable", "0000:03:00.1", "nvme"]),
        (vec![by_link, by_folder], vec!["devices a and b", "same PCI function 0000:01:00.0"]),
    ] {
        let outcome = plan(Capabilities::All, "true", &[], &devices);
        outcome.expect_code(1).expect_error(&parts);
        assert_eq!(outcome.stdout, "", "{outcome}");
    }
}

#[test]
#[cfg_attr(without_namespaces, ignore = "needs user namespaces")]
fn case_c3_a_part_of_a_group_is_planned_with_a_warning_that_lists_the_rest() {
    let outcome = plan(Capabilities::All, "true", &[], &["01:00.0,id=gpu"]);
    outcome.expect_code(0).expect_error(&["WARN:", "gpu", "0000:01:00.1", "vfio-pci"]);
}

#[test]
#[cfg_attr(without_namespaces, ignore = "needs user namespaces")]
fn case_c5_a_low_limit_of_locked_memory_is_refused_with_both_numbers() {
    let outcome = plan(Capabilities::None, "ulimit -l 64", &["--memory", "1G"], &["01:00.0,id=gpu", "01:00.1"]);
    outcome.expect_code(1).expect_error(&["1073741824 bytes", "65536 bytes", "ulimit -l 1048576", "CAP_IPC_LOCK"]);
}

#[test]
#[cfg_attr(without_namespaces, ignore = "needs user namespaces")]
fn a_check_names_all_that_is_wrong_at_once_and_starts_nothing() {
    let arguments = ["check", "--memory", "1G", "--device", "02:00.0,id=nic", "--device", "03:00.0,id=disk"];
    let outcome = on_host(Capabilities::None, "ulimit -l 64", &arguments);
    outcome.expect_code(2).expect_output(&[
        "problem  driver   nic: 0000:02:00.0 is bound to mlx5_core",
        "problem  group    disk: its IOMMU group 30 is not viable",
        "problem  memlock  host: devices that are passed through need 1073741824 bytes",
        "problem  access   /dev/vfio/30: cannot be opened",
        "nic   disk  root complex",
    ]);
    let json = on_host(Capabilities::All, "true", &["check", "--json", "01:00.0,id=gpu", "01:00.1"]);
    let report: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(report["devices"][0]["name"], "gpu", "{json}");
    assert_eq!(report["result"], "problem", "{json}");
    on_host(Capabilities::All, "true", &["check", "04:00.0"]).expect_code(2).expect_output(&["no PCI function 0000:04:00.0"]);
    on_host(Capabilities::All, "true", &["check", "--host", "/nonexistent", "1:0.0"]).expect_code(2);
}

#[test]
#[cfg_attr(without_namespaces, ignore = "needs user namespaces")]
fn cdi_files_that_are_generated_lead_to_the_devices_by_name_address_and_node() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    on_host(Capabilities::All, "true", &["cdi", "generate", "--output", folder])
        .expect_code(0)
        .expect_output(&["pgpu.yaml: 1 devices"]);
    for device in ["nvidia.com/pgpu=gpu0,id=gpu", "01:00.0,id=gpu"] {
        let outcome = plan(Capabilities::All, "true", &["--cdi-dir", folder], &[device]);
        outcome.expect_code(0).expect_output(&["00.0  gpu 10de:20b8, clique 0"]);
    }
    let outcome = plan(Capabilities::All, "true", &["--cdi-dir", folder], &["/dev/vfio/10,id=card"]);
    outcome.expect_code(0).expect_output(&["card 10de:20b8, clique 0", "card-2 10de:20b8"]);
}
