use pci::hierarchy::Space;
use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn port(name: &str, prefetchable: u64) -> Candidate {
    let name = Name::from(name);
    Candidate { name, far: Far::Unknown, is_of_other: false, prefetchable, memory: 32 * MIB, unfit: None }
}

fn lacks(of: Space, enough: u64) -> Option<Unfit> {
    Some(Unfit::Room(Shortfall(vec![Missing { of, needed: enough, there: MIB, enough }])))
}

fn chosen(free: &[Candidate]) -> &str {
    &free[choose(free).unwrap()].name.0
}

#[test]
fn the_smallest_window_with_room_is_taken_and_the_first_of_equal_ones() {
    let free = [port("a", 1 << 40), port("b", 64 * GIB), port("c", 2 * MIB), port("d", 2 * MIB)];
    assert_eq!(chosen(&free), "c");
    let small = Candidate { unfit: lacks(Space::Prefetchable, GIB), ..port("c", 2 * MIB) };
    assert_eq!(chosen(&[port("a", 1 << 40), port("b", 64 * GIB), small]), "b");
    let low = Candidate { memory: MIB, ..port("e", GIB) };
    assert_eq!(chosen(&[port("a", GIB), low]), "e");
}

#[test]
fn near_comes_before_small_and_free_of_others_before_small() {
    let far = [Far::Own, Far::Switch { levels: 0 }, Far::Switch { levels: 2 }, Far::RootComplex, Far::Node, Far::Unknown];
    for pair in far.windows(2) {
        let near = Candidate { far: pair[0], is_of_other: true, ..port("near", 1 << 40) };
        let other = Candidate { far: pair[1], ..port("other", MIB) };
        assert_eq!(chosen(&[other.clone(), near.clone()]), "near", "{pair:?}");
        let full = Candidate { unfit: lacks(Space::Memory, GIB), ..near };
        assert_eq!(chosen(&[other, full]), "other", "{pair:?}");
    }
    let home = Candidate { is_of_other: true, ..port("home", MIB) };
    assert_eq!(chosen(&[home, port("free", GIB)]), "free");
    let away = Candidate { far: Far::OtherNode, ..port("away", MIB) };
    assert_eq!(chosen(&[away, port("unknown", GIB)]), "unknown");
}

#[test]
fn a_refusal_says_why_each_free_port_does_not_do() {
    let small = |name: &str| Candidate { unfit: lacks(Space::Prefetchable, 64 * GIB), ..port(name, GIB) };
    let mut free: Vec<Candidate> = (0..6).map(|index| small(&format!("port{index}"))).collect();
    free.push(Candidate { unfit: Some(Unfit::Promised(Name::from("gpu7"))), ..port("near", GIB) });
    free.push(Candidate { unfit: lacks(Space::Memory, 32 * MIB), ..port("low", GIB) });
    let refused = choose(&free).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "`port0`, `port1`, `port2`, `port3` and 2 more: its prefetchable window lacks 65535M (64G needed, 1M there); \
         `near`: it is promised to device gpu7, which waits until it can reach memory; \
         `low`: its memory window lacks 31M (32M needed, 1M there)"
    );
    let enough: Vec<(Space, u64)> = refused.missing().0.iter().map(|missing| (missing.of, missing.enough)).collect();
    assert_eq!(enough, [(Space::Prefetchable, 64 * GIB), (Space::Memory, 32 * MIB)]);
}

#[test]
fn a_refusal_is_short_however_many_ports_there_are() {
    let free: Vec<Candidate> = (1..=200)
        .map(|size| Candidate { unfit: lacks(Space::Prefetchable, (size + 1) * GIB), ..port(&"x".repeat(64), size * GIB) })
        .collect();
    let text = choose(&free).unwrap_err().to_string();
    assert!(text.len() < 1000 && text.ends_with("196 more in a like way"), "{text}");
}

fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
    let far = prop_oneof![
        Just(Far::Own),
        (0usize..4).prop_map(|levels| Far::Switch { levels }),
        Just(Far::RootComplex),
        Just(Far::Node),
        Just(Far::Unknown),
        Just(Far::OtherNode),
    ];
    let one = (far, any::<bool>(), 0u64..4, 0u64..4, any::<bool>());
    let one = one.prop_map(|(far, is_of_other, prefetchable, memory, fits)| Candidate {
        far,
        is_of_other,
        memory,
        unfit: if fits { None } else { lacks(Space::Memory, GIB) },
        ..port("p", prefetchable)
    });
    prop::collection::vec(one, 0..12)
}

proptest! {
    #[test]
    fn a_device_is_refused_only_where_no_free_port_could_hold_it_and_none_that_fits_is_better(free in candidates()) {
        let fits = |port: &Candidate| port.unfit.is_none();
        let key = |port: &Candidate| (port.far, port.is_of_other, port.prefetchable, port.memory);
        match choose(&free) {
            Ok(chosen) => {
                prop_assert!(fits(&free[chosen]));
                for (index, other) in free.iter().enumerate().filter(|(_, port)| fits(port)) {
                    prop_assert!((key(&free[chosen]), chosen) <= (key(other), index));
                }
            }
            Err(refusals) => {
                prop_assert!(!free.iter().any(fits));
                prop_assert_eq!(refusals.0.len(), free.len());
            }
        }
    }
}
