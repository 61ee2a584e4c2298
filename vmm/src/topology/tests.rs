use super::matrix::Level;
use super::*;

/// A recorded host of `resources/topologies/hosts`.
pub fn host_file(name: &str) -> RecordedHost {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../resources/topologies/hosts");
    RecordedHost::read(&Path::new(folder).join(format!("{name}.json"))).unwrap()
}

pub fn level_counts(matrix: &Matrix) -> [usize; 5] {
    [Level::Pix, Level::Pxb, Level::Phb, Level::Node, Level::Sys]
        .map(|level| matrix.pairs().filter(|(_, _, found)| *found == level).count())
}

/// A guest in the shape that `pcie` asks for.
pub(super) fn planned_as(file: &str, devices: &[&str], pcie: &str) -> Planned {
    let devices: Vec<DeviceConfig> = devices.iter().map(|device| device.parse().unwrap()).collect();
    Planned::new(&host_file(file), &devices, Some(&pcie.parse().unwrap())).unwrap()
}

fn planned(file: &str, devices: &[&str]) -> Planned {
    let devices: Vec<DeviceConfig> = devices.iter().map(|device| device.parse().unwrap()).collect();
    Planned::new(&host_file(file), &devices, None).unwrap()
}

/// A guest with `devices` of a host, and their addresses in it, in the same order.
pub fn plan_of(file: &str, devices: &[Named]) -> (View, Vec<Named>) {
    let texts: Vec<String> = devices.iter().enumerate().map(|(index, (at, _))| format!("{at},id=d{index}")).collect();
    let planned = planned(file, &texts.iter().map(String::as_str).collect::<Vec<_>>());
    let guest = devices.iter().enumerate().map(|(index, (_, name))| {
        let function = planned.plan.pci.by_name(&format!("d{index}")).unwrap();
        (function.at.to_string(), name.clone())
    });
    (planned.view(), guest.collect())
}

pub fn plan_of_gpu_and_nic() -> View {
    planned("one-switch", &["0000:03:00.0,id=gpu0,clique=0", "0000:05:00.0,id=nic0"]).view()
}

#[test]
fn a_plan_keeps_what_leads_to_the_devices_and_their_links() {
    let view = plan_of_gpu_and_nic();
    let facts: Vec<_> = view
        .nodes
        .iter()
        .map(|node| format!("{} {} {}", node.at, node.noun(), node.link.map_or(String::new(), |link| link.current.to_string())))
        .collect();
    assert_eq!(
        facts,
        [
            "0000:00:00.0 root port 32GT/s x16",
            "0000:01:00.0 switch 32GT/s x16",
            "0000:02:00.0 port 16GT/s x16",
            "0000:03:00.0 GPU 16GT/s x16",
            "0000:02:01.0 port 32GT/s x16",
            "0000:04:00.0 NIC 32GT/s x16",
        ]
    );
}

#[test]
fn a_guest_that_is_flatter_than_its_host_is_told_pair_by_pair() {
    let devices = ["0000:03:00.0,id=gpu0", "0000:04:00.0,id=nic0", "0000:83:00.0,id=gpu1"].map(|text| text.parse().unwrap());
    let pcie: PcieConfig = "topology=root-ports".parse().unwrap();
    let host = host_file("two-nodes");
    let told = Planned::new(&host, &devices, Some(&pcie)).unwrap().beside_host(&host.tree);
    assert_eq!(
        told,
        "\
host                      guest
      gpu0  gpu1  nic0          gpu0  gpu1  nic0
gpu0  X     SYS   PIX     gpu0  X     PHB   PHB
gpu1  SYS   X     SYS     gpu1  PHB   X     PHB
nic0  PIX   SYS   X       nic0  PHB   PHB   X

gpu0 and gpu1: SYS on the host, PHB in the guest
gpu0 and nic0: PIX on the host, PHB in the guest
gpu1 and nic0: SYS on the host, PHB in the guest
3 of 3 pairs differ
"
    );
}

#[test]
fn the_plan_s_tree_is_that_of_a_dry_run() {
    let text = planned("one-switch", &["0000:03:00.0,id=gpu0,clique=0"]).tree();
    assert_eq!(text, "-[0000:00]---00.0-[01-03]----00.0-[02-03]----00.0-[03]----00.0  gpu0 10de:20b5, clique 0\n");
}
