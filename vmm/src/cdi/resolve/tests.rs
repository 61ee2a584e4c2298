use std::path::Path;

use pci::ids::ClassCode;

use super::*;
use crate::cdi::parse::parse;

const GPU: u32 = 0x03_0200;
const AUDIO: u32 = 0x04_0300;
const NIC: u32 = 0x02_0000;
const PORT: u32 = 0x06_0400;

fn host(functions: &[(&str, u32, u32)]) -> Vec<HostFunction> {
    let function = |(at, class, group): &(&str, u32, u32)| HostFunction {
        at: at.parse().unwrap(),
        class: ClassCode::new(*class),
        group: Some(*group),
        node: Some(format!("vfio{group}")),
    };
    functions.iter().map(function).collect()
}

fn library(files: &[&str]) -> Library {
    let parsed = files.iter().enumerate().flat_map(|(index, text)| {
        let text = format!("cdiVersion: 0.6.0\nkind: a.com/b\ndevices:\n{text}");
        parse(Path::new(&format!("/etc/cdi/{index}.yaml")), &text).unwrap()
    });
    Library { entries: parsed.collect(), ..Library::default() }
}

/// What a `--device` comes to.
fn resolve(files: &[&str], device: &str) -> Result<Vec<String>, ResolveError> {
    let host =
        host(&[("3d:00.0", NIC, 66), ("41:00.0", GPU, 71), ("50:00.0", PORT, 80), ("51:00.0", GPU, 80), ("51:00.1", AUDIO, 80)]);
    let library = library(files);
    let device: DeviceConfig = device.parse().unwrap();
    let at = match &device.kind {
        DeviceKind::Vfio(vfio) => vfio.path.to_str().and_then(|path| path.parse().ok()),
        _ => None,
    };
    let resolved = Resolver { library: &library, host: &host }.resolve(&device, at)?;
    Ok(resolved.iter().map(ToString::to_string).collect())
}

fn devices(files: &[&str], device: &str) -> Vec<String> {
    resolve(files, device).unwrap_or_else(|error| panic!("{device}: {error}"))
}

fn refusal(files: &[&str], device: &str) -> String {
    resolve(files, device).unwrap_err().to_string()
}

const BY_ADDRESS: &str = "- {name: gpu0, annotations: {bdf: \"41:00.0\", clique-id: 2}}\n";

#[test]
fn a_name_leads_to_a_function_by_address_group_or_own_node() {
    let by_group = "- {name: gpu0, containerEdits: {deviceNodes: [{path: /dev/vfio/71}]}}\n";
    let by_node = "- {name: gpu0, containerEdits: {deviceNodes: [{path: /dev/vfio/devices/vfio71}]}}\n";
    let plain = "path=0000:41:00.0,id=x";
    assert_eq!(devices(&[BY_ADDRESS], "a.com/b=gpu0,id=x"), [format!("{plain},clique=2,clique-any-vendor=on")]);
    assert_eq!(devices(&[by_group], "a.com/b=gpu0,id=x"), [plain]);
    assert_eq!(devices(&[by_node], "a.com/b=gpu0,id=x"), [plain]);
}

#[test]
fn what_a_file_says_applies_to_devices_given_by_path() {
    let wanted = ["path=0000:41:00.0,clique=2,clique-any-vendor=on"];
    assert_eq!(devices(&[BY_ADDRESS], "0000:41:00.0"), wanted);
    assert_eq!(devices(&[BY_ADDRESS], "/dev/vfio/71"), wanted);
    let by_group = "- {name: gpu0, annotations: {clique-id: 2}, containerEdits: {deviceNodes: [{path: /dev/vfio/71}]}}\n";
    assert_eq!(devices(&[by_group], "0000:41:00.0"), wanted);
    assert_eq!(devices(&[BY_ADDRESS], "0000:3d:00.0"), ["path=0000:3d:00.0"]);
}

#[test]
fn what_the_user_says_stands_above_files() {
    let other = "- {name: other, annotations: {bdf: \"41:00.0\", clique-id: 3}}\n";
    assert_eq!(devices(&[BY_ADDRESS, other], "a.com/b=gpu0,clique=7"), ["path=0000:41:00.0,clique=7"]);
}

#[test]
fn a_group_stands_for_all_its_devices_but_bridges_and_audio_is_in_no_clique() {
    let card = "- {name: card, annotations: {clique-id: 1}, containerEdits: {deviceNodes: [{path: /dev/vfio/80}]}}\n";
    let gpu = "path=0000:51:00.0,id=g,clique=1,clique-any-vendor=on".to_owned();
    assert_eq!(devices(&[card], "a.com/b=card,id=g"), [gpu, "path=0000:51:00.1,id=g-2".to_owned()]);
    assert_eq!(devices(&[], "/dev/vfio/80,id=g,clique=1"), ["path=0000:51:00.0,id=g,clique=1", "path=0000:51:00.1,id=g-2"]);
    assert!(refusal(&[card], "a.com/b=card,on=port0").contains("0000:51:00.0, 0000:51:00.1, which do not fit in one place"));
}

#[test]
fn of_a_card_in_one_entry_the_gpu_keeps_its_port_and_the_rest_goes_on_the_conventional_bus() {
    let card = "- {name: card, annotations: {attach-pci: true}, containerEdits: {deviceNodes: [{path: /dev/vfio/80}]}}\n";
    assert_eq!(devices(&[card], "a.com/b=card,id=g"), ["path=0000:51:00.0,id=g", "path=0000:51:00.1,id=g-2,attach=pci"]);
    let alone = "- {name: gpu, annotations: {attach-pci: true, bdf: \"51:00.0\"}}\n";
    assert_eq!(devices(&[alone], "a.com/b=gpu"), ["path=0000:51:00.0,attach=pci"]);
}

#[test]
fn an_address_picks_one_function_of_a_group() {
    let gpu = "- {name: gpu, annotations: {bdf: \"51:00.0\"}, containerEdits: {deviceNodes: [{path: /dev/vfio/80}]}}\n";
    assert_eq!(devices(&[gpu], "a.com/b=gpu"), ["path=0000:51:00.0"]);
}

#[test]
fn a_combined_entry_takes_what_single_entries_say() {
    let pair = "- {name: pair, containerEdits: {deviceNodes: [{path: /dev/vfio/71}, {path: /dev/vfio/66}]}}\n";
    let nic = "- {name: nic0, annotations: {bdf: \"3d:00.0\", attach-pci: true}}\n";
    let conventional = "path=0000:3d:00.0,attach=pci";
    assert_eq!(
        devices(&[pair, BY_ADDRESS, nic], "a.com/b=pair"),
        ["path=0000:41:00.0,clique=2,clique-any-vendor=on", conventional]
    );
    assert_eq!(devices(&[nic], "3d:00.0"), [conventional]);
    assert_eq!(devices(&[nic], "3d:00.0,attach=pcie"), ["path=0000:3d:00.0,attach=pcie"]);
    assert_eq!(devices(&[nic], "3d:00.0,on=rp0"), ["path=0000:3d:00.0,on=rp0"]);
}

#[test]
fn entries_that_contradict_each_other_or_the_host_are_refused() {
    let other = "- {name: other, annotations: {bdf: \"41:00.0\", clique-id: 3}}\n";
    let gone = "- {name: gone, annotations: {bdf: \"99:00.0\"}}\n";
    let old_group = "- {name: gpu0, annotations: {bdf: \"41:00.0\"}, containerEdits: {deviceNodes: [{path: /dev/vfio/66}]}}\n";
    let no_group = "- {name: gpu0, containerEdits: {deviceNodes: [{path: /dev/vfio/7}]}}\n";
    let nothing = "- {name: gpu0, containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}}\n";
    let wrong = "- {name: gpu0, annotations: {clique-id: 16}, containerEdits: {deviceNodes: [{path: /dev/vfio/71}]}}\n";
    let wrong_clique = "- {name: gpu0, annotations: {clique-id: 77, bdf: \"41:00.0\"}}\n";
    let wrong_place = "- {name: gpu0, annotations: {attach-pci: \"no\", bdf: \"41:00.0\"}}\n";
    for (files, device, part) in [
        (
            &[BY_ADDRESS, other][..],
            "a.com/b=gpu0",
            "CDI files disagree on `clique-id` of 0000:41:00.0: /etc/cdi/0.yaml:4 and /etc/cdi/1.yaml:4",
        ),
        (&[BY_ADDRESS, other], "41:00.0", "CDI files disagree on `clique-id`"),
        (&[BY_ADDRESS, BY_ADDRESS], "a.com/b=gpu0", "two CDI files name the device a.com/b=gpu0: /etc/cdi/0.yaml:4 and"),
        (&[BY_ADDRESS], "a.com/b=gpu9", "no CDI file names the device a.com/b=gpu9; named are: a.com/b=gpu0"),
        (&[], "a.com/b=gpu9", "named are: none"),
        (&[gone], "a.com/b=gone", "there is no PCI function 0000:99:00.0"),
        (&[old_group], "a.com/b=gpu0", "`bdf` names 0000:41:00.0 of IOMMU group 71, and its device nodes are /dev/vfio/66"),
        (&[old_group], "41:00.0", "`bdf` names 0000:41:00.0 of IOMMU group 71"),
        (&[no_group], "a.com/b=gpu0", "no PCI function of this host is behind /dev/vfio/7;"),
        (&[nothing], "a.com/b=gpu0", "it names no VFIO device"),
        (&[wrong], "a.com/b=gpu0", "/etc/cdi/0.yaml:4: annotation `clique-id` is `16`"),
        (&[wrong], "41:00.0", "annotation `clique-id` is `16`"),
        (&[wrong_clique], "41:00.0", "/etc/cdi/0.yaml:4: annotation `clique-id` is `77`"),
        (&[wrong_clique], "/dev/vfio/71", "annotation `clique-id` is `77`"),
        (&[wrong_place], "41:00.0,clique=1", "annotation `attach-pci` is `no`"),
        (&[], "/dev/vfio/9", "no PCI function of this host is behind /dev/vfio/9"),
    ] {
        let error = refusal(files, device);
        assert!(error.contains(part), "{files:?} {device}: {error}");
    }
}

#[test]
fn mistakes_about_other_devices_do_no_harm() {
    let gone = "- {name: gone, annotations: {bdf: \"99:00.0\"}}\n";
    let wrong = "- {name: wrong, annotations: {bdf: \"3d:00.0\", clique-id: 16}}\n";
    assert_eq!(devices(&[gone, wrong], "41:00.0"), ["path=0000:41:00.0"]);
}
