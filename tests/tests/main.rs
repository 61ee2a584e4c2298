//! Tests that run the built executable, in one program, which is linked once.

mod api;
mod api_devices;
mod bad_input;
mod boot;
mod bus_slots;
mod cli;
mod console;
mod consoles;
mod deadlines;
mod demo;
mod described;
mod disk_faults;
mod disks;
mod documents;
mod events;
mod hierarchy;
mod host_devices;
mod hostile_clients;
mod machine;
mod messages;
mod numa;
mod pause;
mod pcie;
mod planning;
mod policy;
mod replicate;
mod resize;
mod segments;
mod snapshot;
mod snapshot_edits;
mod sockets;
mod states;
mod surroundings;
mod templates;
mod terminal;
mod vhost_user;

#[test]
fn every_file_of_tests_is_a_module_here() {
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests")).unwrap().map(|entry| entry.unwrap().path());
    let modules = files.filter(|path| path.extension().is_some_and(|ending| ending == "rs") && !path.ends_with("main.rs"));
    let modules: Vec<String> = modules.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    assert!(!modules.is_empty());
    for module in modules {
        assert!(include_str!("main.rs").lines().any(|line| line == format!("mod {module};")), "{module}.rs is in no program");
    }
}
