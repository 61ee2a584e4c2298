//! Hosts of `tests/topologies`, each replicated and booted with stand-ins for its devices: what the guest finds is as near to
//! each other as on the host, below the same switches with the same links.
#![expect(clippy::unwrap_used, reason = "helpers of tests end a test that cannot go on")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tests::guest::Guest;
use tests::server::Server;
use tests::{Outcome, banyan};

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("topologies")
}

/// All recorded hosts.
fn hosts() -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|ending| ending == "json")).collect();
    files.sort();
    assert!(files.len() >= 9, "{files:?}");
    files
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The functions of a recorded host, by address.
fn functions(host: &Path) -> BTreeMap<String, Value> {
    let file: Value = serde_json::from_str(&std::fs::read_to_string(host).unwrap()).unwrap();
    let functions = file["functions"].as_array().unwrap().iter();
    functions.map(|function| (function["at"].as_str().unwrap().to_owned(), function.clone())).collect()
}

/// The pairs of a matrix that `banyan topology matrix` printed: `a b` -> level.
fn pairs(printed: &str) -> BTreeMap<(String, String), String> {
    let mut lines = printed.lines().take_while(|line| !line.is_empty());
    let names: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
    let mut pairs = BTreeMap::new();
    for line in lines {
        let mut cells = line.split_whitespace();
        let row = cells.next().unwrap();
        for (column, level) in names.iter().zip(cells).take_while(|(column, _)| **column != row) {
            pairs.insert(((*column).to_owned(), row.to_owned()), level.to_owned());
        }
    }
    pairs
}

fn host_matrix(host: &Path) -> BTreeMap<(String, String), String> {
    pairs(&banyan(&["topology", "matrix", "--host", text(host)]).expect_code(0).stdout)
}

/// The devices of a matrix, in its order.
fn devices(pairs: &BTreeMap<(String, String), String>) -> Vec<String> {
    let mut names: Vec<String> = pairs.keys().flat_map(|(a, b)| [a.clone(), b.clone()]).collect();
    names.sort();
    names.dedup();
    names
}

/// What a guest reported of one function.
#[derive(Debug, Default, Clone)]
struct Seen {
    words: BTreeMap<String, String>,
}

impl Seen {
    fn get(&self, key: &str) -> &str {
        self.words.get(key).map_or("", String::as_str)
    }
}

/// A guest's report: functions by address, root buses with their nodes.
#[derive(Debug, Default)]
struct Report {
    functions: BTreeMap<String, Seen>,
    roots: BTreeMap<String, String>,
}

impl Report {
    fn of(text: &str) -> Self {
        let mut report = Self::default();
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let pairs = words.iter().filter_map(|word| word.split_once('='));
            match words[0] {
                "root" => {
                    report.roots.insert(words[1].to_owned(), words[2].trim_start_matches("node=").to_owned());
                }
                kind @ ("function" | "bridge" | "link") => {
                    let at = if words[1].len() == 7 { format!("0000:{}", words[1]) } else { words[1].to_owned() };
                    let seen = report.functions.entry(at).or_default();
                    seen.words.extend(pairs.map(|(key, value)| (format!("{kind} {key}"), value.to_owned())));
                }
                _ => {}
            }
        }
        report
    }

    /// The functions above `at`, the nearest first, then the root bus: whose secondary bus is that of the one before.
    fn above(&self, at: &str) -> (Vec<String>, String) {
        let mut path = Vec::new();
        let mut bus = at[..7].to_owned();
        while let Some((above, _)) =
            self.functions.iter().find(|(above, seen)| format!("{}:{}", &above[..4], seen.get("bridge secondary")) == bus)
        {
            path.push(above.clone());
            bus = above[..7].to_owned();
        }
        (path, bus)
    }

    /// How near two functions are, by what `nvidia-smi topo -m` goes by.
    fn level(&self, a: &str, b: &str) -> &'static str {
        let ((above_a, root_a), (above_b, root_b)) = (self.above(a), self.above(b));
        let switches = |above: &[String]| {
            above.iter().filter(|at| self.functions[*at].get("function type") == "upstream-port").cloned().collect::<Vec<_>>()
        };
        let (switches_a, switches_b) = (switches(&above_a), switches(&above_b));
        if a[..10] == b[..10] || (!switches_a.is_empty() && switches_a.first() == switches_b.first()) {
            "PIX"
        } else if switches_a.iter().any(|switch| switches_b.contains(switch)) {
            "PXB"
        } else if self.roots[&root_a] != self.roots[&root_b] {
            "SYS"
        } else if root_a == root_b {
            "PHB"
        } else {
            "NODE"
        }
    }
}

/// Boots a guest of `host` with `devices`, called d0, d1, ...; returns its report and where it finds them.
fn boot(host: &Path, devices: &[String], pcie: &str) -> (Report, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report");
    let named: Vec<String> = devices.iter().enumerate().map(|(index, at)| format!("{at},id=d{index}")).collect();
    let named: Vec<&str> = named.iter().map(String::as_str).collect();
    let arguments = ["--host", text(host), "--pcie", pcie];
    let console = format!("file={}", path.display());
    Guest::new("probe").with(&arguments).devices(&named).with(&["--debug-console", &console]).run().expect_code(0);
    let report = Report::of(&std::fs::read_to_string(&path).unwrap());
    let mut plan = vec!["topology", "plan", "--format", "json"];
    plan.extend(arguments);
    plan.extend(named.iter().flat_map(|device| ["--device", device]));
    let plan: Value = serde_json::from_str(&banyan(&plan).expect_code(0).stdout).unwrap();
    let mut found = BTreeMap::new();
    for root in plan["root-complexes"].as_array().unwrap() {
        collect(&root["functions"], &mut found);
    }
    (report, (0..devices.len()).map(|index| found[&format!("d{index}")].clone()).collect())
}

fn collect(functions: &Value, found: &mut BTreeMap<String, String>) {
    for function in functions.as_array().into_iter().flatten() {
        let word = |key: &str| function[key].as_str().unwrap_or_default().to_owned();
        found.insert(word("name"), word("address"));
        collect(&function["functions"], found);
    }
}

/// Kind, ids, subsystem and link of each switch port of the host above `devices`, sorted; root ports by their link alone.
fn ports_of_host(host: &Path, devices: &[String]) -> Vec<String> {
    let functions = functions(host);
    let mut above = BTreeMap::new();
    for device in devices {
        let mut on = functions[device]["on"].as_str().unwrap();
        while let Some(port) = functions.get(on) {
            above.insert(on.to_owned(), port.clone());
            on = port["on"].as_str().unwrap();
        }
    }
    let mut ports: Vec<String> = above
        .values()
        .map(|port| {
            let word = |key: &str| port[key].as_str().unwrap_or("none");
            // A port that tells no link shows that of the devices, which all have the same in such a file.
            let link = if port["link"].is_null() { &functions[&devices[0]]["link"] } else { &port["link"] };
            let link = format!("{} {}", link["max"].as_str().unwrap(), link["current"].as_str().unwrap());
            match word("kind") {
                "root-port" => format!("root-port {link}"),
                kind => format!("{kind} {} {} {link}", word("ids"), word("subsystem")),
            }
        })
        .collect();
    ports.sort();
    ports
}

fn ports_of_guest(report: &Report) -> Vec<String> {
    let ports = report.functions.values().filter(|seen| !seen.get("bridge secondary").is_empty());
    let mut ports: Vec<String> = ports
        .map(|seen| {
            let link = format!("{} {}", seen.get("link max"), seen.get("link now")).replace(',', " ");
            match seen.get("function type") {
                "root-port" => format!("root-port {link}"),
                kind => format!("{kind} {} {} {link}", seen.get("function id"), seen.get("function subsystem")),
            }
        })
        .collect();
    ports.sort();
    ports
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn every_host_is_found_again_in_the_guest_pair_by_pair_and_port_by_port() {
    for host in hosts() {
        let on_host = host_matrix(&host);
        let all = devices(&on_host);
        // All devices; every second one; the last half backwards.
        let some: Vec<String> = all.iter().step_by(2).cloned().collect();
        let half: Vec<String> = all.iter().skip(all.len() / 2).rev().cloned().collect();
        for chosen in [&all, &some, &half] {
            let (report, found) = boot(&host, chosen, "topology=host,gpu-order=topology");
            for ((a, b), level) in &on_host {
                let place = |name| Some(&found[chosen.iter().position(|at| at == name)?]);
                if let (Some(at_a), Some(at_b)) = (place(a), place(b)) {
                    assert_eq!(report.level(at_a, at_b), level, "{}: {a} and {b} at {at_a} and {at_b}", host.display());
                }
            }
            assert_eq!(ports_of_guest(&report), ports_of_host(&host, chosen), "{}", host.display());
            for at in &found {
                assert!(at.ends_with(":00.0") || at.ends_with(":00.1"), "{at}");
            }
        }
    }
}

/// How many pairs there are of each level: GPU-GPU, GPU-NIC and NIC-NIC.
fn counts(host: &Path) -> [String; 3] {
    let functions = functions(host);
    let is_gpu = |at: &String| functions[at]["class"].as_str().unwrap().starts_with("03");
    let mut counts: [BTreeMap<&str, usize>; 3] = Default::default();
    let matrix = host_matrix(host);
    for ((a, b), level) in &matrix {
        let nics = usize::from(!is_gpu(a)) + usize::from(!is_gpu(b));
        *counts[nics].entry(level.as_str()).or_default() += 1;
    }
    counts.map(|levels| levels.iter().map(|(level, count)| format!("{level} {count}")).collect::<Vec<_>>().join(" "))
}

#[test]
fn the_hosts_have_as_many_pairs_of_each_level_as_their_sources_say() {
    for (file, gpus, mixed, nics) in [
        ("a100x-dpu", "SYS 1", "PXB 4 SYS 4", "PIX 2 SYS 4"),
        ("ibm-gx3d-8h100", "PHB 12 SYS 16", "PHB 24 PIX 8 SYS 32", "PHB 12 SYS 16"),
        ("hgx-h200", "PHB 3 SYS 3", "PHB 6 PIX 4 SYS 6", "PHB 3 SYS 3"),
        ("h200-vm-flat", "", "PHB 1", ""),
        ("aws-p4d", "PHB 8 PIX 4 SYS 16", "PHB 8 PIX 8 SYS 16", "PHB 2 SYS 4"),
        ("aws-p5", "", "", "PHB 192 PIX 48 SYS 256"),
        ("azure-ndv4", "PIX 4 SYS 24", "PIX 16 SYS 48", "PIX 4 SYS 24"),
        ("hygon-dcu", "PXB 6", "PXB 4", ""),
        ("dgx2", "NODE 32 PIX 8 PXB 16 SYS 64", "", ""),
    ] {
        assert_eq!(counts(&folder().join(file).with_extension("json")), [gpus, mixed, nics].map(str::to_owned), "{file}");
    }
}

/// The tree that a guest prints, without addresses of other root buses and ids.
fn tree(outcome: &Outcome) -> String {
    outcome.expect_code(0).stdout.lines().map(|line| line.trim_end()).collect::<Vec<_>>().join("\n")
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn the_shapes_of_kata_s_reference_architecture_are_printed_by_guests() {
    let host = folder().join("a100x-dpu.json");
    let devices = |names: [&str; 4]| {
        let at = |name: &str| match name {
            "gpu0" => "0000:41:00.0,id=gpu0",
            "nic0" => "0000:3d:00.0,id=nic0",
            "gpu1" => "0000:de:00.0,id=gpu1",
            _ => "0000:da:00.0,id=nic1",
        };
        names.map(at)
    };
    let print = |pcie: &str, names| {
        tree(&Guest::new("probe").with(&["--host", text(&host), "--pcie", pcie]).devices(&devices(names)).run())
    };
    // Flat root ports with spare ones: two NICs, two GPUs, four empty.
    let flat = print("topology=root-ports,cliques=off,root-ports=4,hot-plug=no-port", ["nic0", "nic1", "gpu0", "gpu1"]);
    assert_eq!(
        flat,
        "\
-[0000:00]-+-00.0-[01]----00.0  15b3:a2d6 16GT/s x16
           +-01.0-[02]----00.0  15b3:a2d6 16GT/s x16
           +-02.0-[03]----00.0  10de:20b8 16GT/s x16
           +-03.0-[04]----00.0  10de:20b8 16GT/s x16
           +-04.0-[05]--
           +-04.1-[06]--
           +-04.2-[07]--
           \\-04.3-[08]--"
    );
    // Two switches, a GPU and a NIC below each.
    let switches = print("topology=switch,cliques=off,switches=2,hot-plug=no-port", ["gpu0", "nic0", "nic1", "gpu1"]);
    assert_eq!(
        switches,
        "\
-[0000:00]-+-00.0-[01-04]----00.0-[02-04]--+-00.0-[03]----00.0  10de:20b8 16GT/s x16
           |                               \\-01.0-[04]----00.0  15b3:a2d6 16GT/s x16
           \\-00.1-[05-08]----00.0-[06-08]--+-00.0-[07]----00.0  15b3:a2d6 16GT/s x16
                                           \\-01.0-[08]----00.0  10de:20b8 16GT/s x16"
    );
    // As on the host: the GPU behind a switch of its own, each card on its root complex.
    let replica = print("topology=host,cliques=off", ["gpu0", "nic0", "gpu1", "nic1"]);
    assert_eq!(
        replica,
        "\
-[0000:00]---00.0-[01-06]----00.0-[02-06]--+-00.0-[03-05]----00.0-[04-05]----00.0-[05]----00.0  10de:20b8 16GT/s x16
                                           \\-01.0-[06]----00.0  15b3:a2d6 16GT/s x16
-[0000:07]---00.0-[08-0d]----00.0-[09-0d]--+-00.0-[0a-0c]----00.0-[0b-0c]----00.0-[0c]----00.0  10de:20b8 16GT/s x16
                                           \\-01.0-[0d]----00.0  15b3:a2d6 16GT/s x16"
    );
}

#[test]
fn an_order_of_gpus_that_the_host_s_tree_cannot_have_is_refused() {
    let host = folder().join("aws-p4d.json");
    let run = |pcie: &str| {
        banyan(&[
            "run",
            "--dry-run",
            "--host",
            text(&host),
            "--pcie",
            pcie,
            "--device",
            "0000:10:1c.0,id=a",
            "--device",
            "0000:20:1c.0,id=b",
            "--device",
            "0000:10:1d.0,id=c",
        ])
    };
    run("topology=host").expect_code(1).expect_error(&["GPU b was given before GPU c", "a, c, b", "gpu-order=topology"]);
    run("topology=host,gpu-order=topology").expect_code(0).expect_output(&["another order than given: a, c, b"]);
    run("topology=root-ports").expect_code(0);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn the_tree_of_a_guest_that_runs_is_the_planned_one() {
    let host = folder().join("a100x-dpu.json");
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("api");
    let devices = ["0000:41:00.0,id=gpu0", "0000:3d:00.0,id=nic0", "0000:de:00.0,id=gpu1"];
    let arguments = ["--host", text(&host), "--pcie", "topology=host"];
    let guest = Guest::new("echo").options("by=interrupt").with(&arguments).devices(&devices);
    let mut session = guest.with(&["--api-socket", text(&socket)]).start();
    session.expect("ready");
    let show = |format: &str| {
        banyan(&["topology", "show", "--api-socket", text(&socket), "--format", format]).expect_code(0).stdout.clone()
    };
    let plan = |format: &str| {
        let mut plan = vec!["topology", "plan", "--format", format];
        plan.extend(arguments);
        plan.extend(devices.iter().flat_map(|device| ["--device", device]));
        banyan(&plan).expect_code(0).stdout.clone()
    };
    for format in ["dot", "svg", "nccl"] {
        assert_eq!(show(format), plan(format), "{format}");
    }
    assert!(show("tree").contains("gpu1  GPU 10de:20b8, 16GT/s x16, clique 1\n"), "{}", show("tree"));
    session.send("enough\n");
    session.finish().expect_code(tests::guest::PASSED);
}

#[test]
fn a_plan_is_compared_with_its_host_register_by_register() {
    for (host, devices) in [("a100x-dpu", ["0000:41:00.0", "0000:da:00.0"]), ("dgx2", ["0000:34:00.0", "0000:57:00.0"])] {
        let host = folder().join(host).with_extension("json");
        let outcome = banyan(&["topology", "diff", "--host", text(&host), devices[0], devices[1]]);
        outcome.expect_code(0).expect_output(&[" 0 different (!)\n", "pairs: 1 as close as on the host, 0 not\n"]);
        let json = banyan(&["topology", "diff", "--format", "json", "--host", text(&host), devices[0], devices[1]]);
        let json: Value = serde_json::from_str(&json.expect_code(0).stdout).unwrap();
        let functions = json["functions"].as_array().unwrap();
        let link = |function: &Value| {
            let rows = function["registers"].as_array().unwrap().iter();
            rows.filter(|row| row["register"] == "LNKSTA").all(|row| row["verdict"] == "same")
        };
        assert!(functions.len() >= 6 && functions.iter().all(link), "{json:#}");
    }
}

#[test]
fn a_topology_file_for_nccl_tells_the_levels_of_the_host() {
    // What NCCL would read is read again as a host, of which Banyan then says how close the devices are.
    for name in ["hygon-dcu", "ibm-gx3d-8h100", "azure-ndv4"] {
        let host = folder().join(name).with_extension("json");
        let file = tempfile::NamedTempFile::new().unwrap();
        let again = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
        let nccl = banyan(&["topology", "show", "--format", "nccl", "--host", text(&host)]);
        std::fs::write(file.path(), &nccl.expect_code(0).stdout).unwrap();
        let import = std::process::Command::new(folder().join("import")).arg(file.path()).output().unwrap();
        assert!(import.status.success(), "{}", String::from_utf8_lossy(&import.stderr));
        std::fs::write(again.path(), &import.stdout).unwrap();
        assert_eq!(host_matrix(again.path()), host_matrix(&host), "{name}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_device_that_comes_is_below_the_copy_of_its_own_switch_and_in_the_clique_of_its_neighbours() {
    let host = folder().join("aws-p4d.json");
    let arguments = ["--host", text(&host), "--pcie", "topology=host,host-ports=switches"];
    let first = ["0000:10:1c.0,id=g0", "0000:20:1c.0,id=g2"];
    let server = Server::run(&Guest::new("echo").with(&arguments).devices(&first));
    server.until("GET vm.info", "", 200);
    let clique = |id: &str| {
        let reply: Value = serde_json::from_str(&server.devices_json()).unwrap();
        let devices = reply["devices"].as_array().unwrap();
        let found = devices.iter().find(|device| device["id"] == id).unwrap();
        (found["clique"].clone(), found["port"].as_str().unwrap().to_owned(), found["pci_path"].as_str().unwrap().to_owned())
    };
    let (near, far) = (clique("g0"), clique("g2"));
    assert!(near.0.is_number() && near.0 != far.0, "{near:?} {far:?}");
    server.adds("0000:10:1d.0,id=g1");
    let comes = clique("g1");
    let switch = |path: &str| path.rsplitn(3, '/').last().unwrap().to_owned();
    assert_eq!((&comes.0, switch(&comes.2)), (&near.0, switch(&near.2)), "{comes:?} {near:?}");
    assert!(comes.1.starts_with("down-"), "{comes:?}");
    server.refuses("0000:10:1d.0", 409, &["is the host function that this machine has as g1"]);
    // It goes and comes back, to the same port; what belongs nowhere stays away from others' places as long as it can.
    assert_eq!(server.remove("g1"), 204);
    let back = server.until("PUT vm.add-device", r#"{"banyan":"0000:10:1d.0,id=g1"}"#, 200);
    assert!(back.contains(&comes.2), "{back} {comes:?}");
    // A reset keeps it where it is.
    server.expect("PUT vm.reboot", "", 204);
    server.until("GET vm.info", "", 200);
    assert_eq!(clique("g1"), comes);
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_function_of_the_host_whose_removal_the_guest_has_not_noted_is_said_to_be_on_its_way_out() {
    let host = folder().join("aws-p4d.json");
    let arguments = ["--host", text(&host), "--pcie", "topology=host,host-ports=all"];
    let server = Server::run(&Guest::new("slots").options("acknowledge=0").with(&arguments));
    server.until("GET vm.info", "", 200);
    server.until("PUT vm.add-device", r#"{"banyan":"0000:10:1d.0,id=g1"}"#, 200);
    assert_eq!(server.remove("g1"), 204);
    server.refuses(
        "0000:10:1d.0,id=g2",
        409,
        &["g2 is the host function that is being removed as g1", "when the guest has let go"],
    );
    server.refuses("0000:10:1d.0,id=g1", 409, &["device g1 is being removed"]);
    server.expect("PUT vmm.shutdown", "", 204);
}
