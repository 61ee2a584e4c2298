use super::*;
use crate::host::fake::{DOWNSTREAM, FakeFunction, FakeHost, ROOT_PORT, UPSTREAM};
use crate::host::scan::scan_all;

/// Two root complexes. On the first a two-level switch with two GPUs at different depths and a NIC, and a GPU on a root port
/// of its own; on the second a switch with one GPU.
fn host() -> FakeHost {
    let host = FakeHost::new();
    let (root, up, down) = (FakeFunction::port(ROOT_PORT), FakeFunction::port(UPSTREAM), FakeFunction::port(DOWNSTREAM));
    let nic = FakeFunction { vendor: 0x15B3, class: 0x02_0000, ..FakeFunction::default() };
    let gpu = FakeFunction::default();
    let switch = "pci0000:00/0000:00:01.0/0000:01:00.0";
    for (path, function) in [
        ("pci0000:00/0000:00:01.0".to_owned(), &root),
        (switch.to_owned(), &up),
        (format!("{switch}/0000:02:00.0"), &down),
        (format!("{switch}/0000:02:00.0/0000:03:00.0"), &gpu),
        (format!("{switch}/0000:02:00.0/0000:03:00.1"), &gpu),
        (format!("{switch}/0000:02:01.0"), &down),
        (format!("{switch}/0000:02:01.0/0000:04:00.0"), &up),
        (format!("{switch}/0000:02:01.0/0000:04:00.0/0000:05:00.0"), &down),
        (format!("{switch}/0000:02:01.0/0000:04:00.0/0000:05:00.0/0000:06:00.0"), &gpu),
        (format!("{switch}/0000:02:02.0"), &down),
        (format!("{switch}/0000:02:02.0/0000:07:00.0"), &nic),
        ("pci0000:00/0000:00:02.0".to_owned(), &root),
        ("pci0000:00/0000:00:02.0/0000:08:00.0".to_owned(), &gpu),
        ("pci0000:40/0000:40:01.0".to_owned(), &root),
        ("pci0000:40/0000:40:01.0/0000:41:00.0".to_owned(), &up),
        ("pci0000:40/0000:40:01.0/0000:41:00.0/0000:42:00.0".to_owned(), &down),
        ("pci0000:40/0000:40:01.0/0000:41:00.0/0000:42:00.0/0000:43:00.0".to_owned(), &gpu),
    ] {
        host.add(&path, function);
    }
    host
}

const ALL: [&str; 6] = ["03:00.0", "03:00.1", "06:00.0", "07:00.0", "08:00.0", "43:00.0"];

fn decide(policy: Policy, given: &[(&str, u8)]) -> Result<(Vec<String>, Vec<String>), CliqueError> {
    let tree = scan_all(host().sysfs()).unwrap();
    let member = |at: &&str| {
        let given = given.iter().find(|(other, _)| other == at).map(|(_, id)| Clique::new(*id).unwrap());
        Member { at: at.parse().unwrap(), given }
    };
    let members: Vec<Member> = ALL.iter().map(member).collect();
    let decided = cliques(&tree, &members, policy)?;
    let of = decided.of.iter().map(|(at, clique)| format!("{}={}", at.bdf, clique.id())).collect();
    Ok((of, decided.notes.iter().map(ToString::to_string).collect()))
}

#[test]
fn case_h3_gpus_below_one_switch_are_one_clique_whatever_the_level_and_nics_and_further_functions_are_in_none() {
    let (of, notes) = decide(Policy::Switch, &[]).unwrap();
    assert_eq!((of, notes), (["03:00.0=0", "06:00.0=0", "08:00.0=1", "43:00.0=2"].map(String::from).to_vec(), vec![]));
}

#[test]
fn a_root_complex_joins_its_switches_and_ports_if_one_says_so() {
    assert_eq!(decide(Policy::RootComplex, &[]).unwrap().0, ["03:00.0=0", "06:00.0=0", "08:00.0=0", "43:00.0=1"]);
}

#[test]
fn what_a_user_gives_is_kept_shared_by_the_set_and_taken_by_no_other() {
    let (of, notes) = decide(Policy::Switch, &[("06:00.0", 1), ("07:00.0", 0)]).unwrap();
    assert_eq!(of, ["03:00.0=1", "06:00.0=1", "07:00.0=0", "08:00.0=2", "43:00.0=3"]);
    assert_eq!(notes, Vec::<String>::new());
}

#[test]
fn a_set_that_a_user_splits_stays_split_with_a_note() {
    let (of, notes) = decide(Policy::Switch, &[("03:00.0", 4), ("06:00.0", 5)]).unwrap();
    assert_eq!(of, ["03:00.0=4", "06:00.0=5", "08:00.0=0", "43:00.0=1"]);
    assert!(notes[0].contains("0000:03:00.0, 0000:06:00.0 have a direct way") && notes.len() == 1, "{notes:?}");
}

#[test]
fn switched_off_only_given_cliques_are_left_and_gpus_without_one_are_named() {
    assert_eq!(decide(Policy::Off, &[]).unwrap(), (vec![], vec![]));
    let (of, notes) = decide(Policy::Off, &[("03:00.0", 0), ("06:00.0", 0)]).unwrap();
    assert_eq!(of, ["03:00.0=0", "06:00.0=0"]);
    assert!(notes[0].contains("0000:08:00.0, 0000:43:00.0 in none"), "{notes:?}");
}

#[test]
fn a_virtual_function_takes_no_part() {
    let host = host();
    host.make_virtual("43:00.0".parse().unwrap(), "08:00.0".parse().unwrap());
    let tree = scan_all(host.sysfs()).unwrap();
    let members = ["08:00.0", "43:00.0"].map(|at| Member { at: at.parse().unwrap(), given: None });
    assert_eq!(cliques(&tree, &members, Policy::Switch).unwrap().of.len(), 1);
}

#[test]
fn more_sets_than_ids_are_refused() {
    let host = FakeHost::new();
    let members: Vec<Member> = (0..17)
        .map(|device| host.add(&format!("pci0000:00/0000:00:{device:02x}.0"), &FakeFunction::default()))
        .map(|at| Member { at, given: None })
        .collect();
    let tree = scan_all(host.sysfs()).unwrap();
    let error = cliques(&tree, &members, Policy::Switch).unwrap_err();
    assert!(error.to_string().contains("17 sets"), "{error}");
    assert_eq!(cliques(&tree, &members, Policy::RootComplex).unwrap().of.len(), 17);
    assert_eq!(cliques(&tree, members.split_last().unwrap().1, Policy::Switch).unwrap().of.len(), 16);
}
