//! Several root complexes and segments: buses and shares of the apertures.

use super::*;

fn roots(specs: &[(u16, Option<u8>, usize)], bars: &[BarSpec]) -> Topology {
    let mut topology = Topology::default();
    for (index, (segment, first_bus, ports)) in specs.iter().enumerate() {
        let root = format!("rc{index}");
        topology.root_complexes.push(RootComplexSpec { segment: *segment, first_bus: *first_bus, ..root_complex(&root) });
        for port in 0..*ports {
            let (device, number) = (u8::try_from(port / 8).unwrap(), u8::try_from(port % 8).unwrap());
            let name = format!("{root}p{port}");
            topology.nodes.push(at(root_port(&name, &root), device, number));
            topology.nodes.push(endpoint(&format!("{root}e{port}"), &name, bars));
        }
    }
    topology
}

fn buses(topology: &Topology) -> Result<Vec<String>, PlanError> {
    let plan = topology.plan(&roomy())?;
    assert_sound(topology, &plan, &roomy());
    Ok(plan.root_complexes.iter().map(|root| root.buses.to_string()).collect())
}

#[test]
fn root_buses_follow_each_other_without_gaps() {
    assert_eq!(
        buses(&roots(&[(0, None, 2), (0, None, 0), (1, None, 1), (0, None, 3)], &[])).unwrap(),
        ["00-02", "03", "00-01", "04-07"]
    );
}

#[test]
fn wanted_root_buses_are_kept_and_others_go_round_them() {
    assert_eq!(buses(&roots(&[(0, None, 2), (0, Some(1), 1), (0, None, 0)], &[])).unwrap(), ["03-05", "01-02", "00"]);
    assert_eq!(buses(&roots(&[(0, Some(0x20), 1), (0, Some(0x40), 1)], &[])).unwrap(), ["20-21", "40-41"]);
    assert_eq!(buses(&roots(&[(0, Some(255), 0)], &[])).unwrap(), ["ff"]);
}

#[test]
fn root_buses_that_cannot_be_are_refused() {
    let cases = [
        (roots(&[(0, Some(4), 3), (0, Some(7), 0)], &[]), "root complex `rc1` needs buses 07, of which `rc0` has 04-07"),
        (
            roots(&[(0, Some(255), 1)], &[]),
            "`rc0` asks for root bus 0xff and needs 2 bus numbers: its highest possible root bus is 0xfe",
        ),
        (roots(&[(0, Some(128), 0), (0, None, 150)], &[]), "`rc1` needs 151 bus numbers in a row"),
        (roots(&[(0, None, 256)], &[]), "segment 0 needs 257 bus numbers and has 256, 1 too many"),
        (roots(&[(3, None, 200), (3, None, 90)], &[]), "segment 3 needs 292 bus numbers and has 256, 36 too many"),
    ];
    for (topology, said) in cases {
        let error = buses(&topology).unwrap_err().to_string();
        assert!(error.contains(said), "`{error}` lacks `{said}`");
    }
}

#[test]
fn a_segment_holds_256_buses_to_the_last() {
    assert_eq!(buses(&roots(&[(0, None, 255)], &[mem32(4096)])).unwrap(), ["00-ff"]);
    let chain = |depth: usize| {
        let mut nodes = vec![root_port("d0", "rc0")];
        for level in 1..=depth {
            nodes.push(upstream(&format!("u{level}"), &format!("d{}", level - 1)));
            nodes.push(downstream(&format!("d{level}"), &format!("u{level}")));
        }
        nodes.push(endpoint("e", &format!("d{depth}"), &[mem64(GIB)]));
        topology(nodes)
    };
    assert_eq!(buses(&chain(127)).unwrap(), ["00-ff"]);
    buses(&chain(128)).unwrap_err();
}

#[test]
fn one_root_complex_has_the_whole_apertures() {
    let plan = roots(&[(0, None, 1)], &[mem32(MIB)]).plan(&roomy()).unwrap();
    assert_eq!((&plan.root_complexes[0].mem32, &plan.root_complexes[0].mem64), (&roomy().mem32, &roomy().mem64));
}

#[test]
fn root_complexes_share_the_apertures_by_need() {
    let topology = roots(&[(0, None, 2), (0, None, 1), (1, None, 3)], &[mem32(16 * MIB), mem64(128 * GIB)]);
    let plan = topology.plan(&roomy()).unwrap();
    assert_sound(&topology, &plan, &roomy());
    let length = |windows: &[Window]| windows.iter().map(|window| window.len()).sum::<u64>();
    let sizes: Vec<(u64, u64)> =
        plan.root_complexes.iter().map(|root| (length(&root.mem32) / MIB, length(&root.mem64) / GIB)).collect();
    // The first one's share starts at 64 GiB, its first BAR at 128 GiB.
    assert_eq!(sizes, [(32, 64 + 256), (16, 128), (1536 - 48, (1 << 16) - 64 - 64 - 384)]);
}

#[test]
fn a_root_complex_with_small_bars_lives_in_the_gap_before_large_ones() {
    let mut topology = roots(&[(0, None, 1), (0, None, 1)], &[mem64(128 * GIB)]);
    topology.nodes[3] = endpoint("small", "rc1p0", &[mem64(16 * GIB)]);
    let space = Apertures { mem64: vec![Window { base: 64 * GIB, limit: 256 * GIB - 1 }], address_bits: 38, ..roomy() };
    let plan = topology.plan(&space).unwrap();
    assert_sound(&topology, &plan, &space);
    assert_eq!(endpoint_of(&plan, "small").bars[0], Some(64 * GIB));
}

#[test]
fn shares_are_on_1_mib_steps() {
    let mut topology = roots(&[(0, None, 0), (0, None, 1)], &[mem32(MIB), mem64(GIB)]);
    topology.nodes.push(endpoint("small", "rc0", &[mem32(4096), mem64(4096)]));
    let plan = topology.plan(&roomy()).unwrap();
    assert_sound(&topology, &plan, &roomy());
    assert_eq!(plan.root_complexes[0].mem32[0].len(), MIB);
}
