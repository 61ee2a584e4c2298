//! What is said when something is refused: each thing once, nothing that steers a terminal, and the same whoever asks.
#![expect(clippy::unwrap_used, reason = "helpers of tests end a test that cannot go on")]

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread;

use tests::guest::image;
use tests::process::LIMIT;
use tests::server::Server;
use tests::{Guest, Outcome, Session, banyan, in_shell};

/// Every source file of the workspace.
fn sources() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut folders: Vec<PathBuf> = ["api", "arch", "devices", "pci", "vmm"].map(|name| root.join(name).join("src")).into();
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files
}

/// Variants of errors: what stands in `#[error(...)]`, and the fields that follow.
fn variants(source: &str) -> Vec<(&str, &str)> {
    let mut variants = Vec::new();
    for (at, _) in source.match_indices("#[error(") {
        let rest = source.get(at + "#[error(".len()..).unwrap();
        let (mut depth, mut quoted, mut before) = (1, false, ' ');
        let end = rest.char_indices().find(|(_, letter)| {
            match letter {
                '"' if before != '\\' => quoted = !quoted,
                '(' if !quoted => depth += 1,
                ')' if !quoted => depth -= 1,
                _ => {}
            }
            before = *letter;
            depth == 0
        });
        let Some((end, _)) = end else { continue };
        let (text, fields) = rest.split_at(end);
        let ends = ["#[error(", "\n}"].map(|mark| fields.find(mark).unwrap_or(fields.len()));
        variants.push((text, fields.get(..ends[0].min(ends[1])).unwrap()));
    }
    variants
}

/// Names of the fields that are causes.
fn causes(fields: &str) -> Vec<String> {
    let mut causes = Vec::new();
    for mark in ["#[source]", "#[from]"] {
        for (at, _) in fields.match_indices(mark) {
            let after = fields.get(at + mark.len()..).unwrap().trim_start();
            let word: String = after.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect();
            let named = after.get(word.len()..).is_some_and(|rest| rest.starts_with(':') && !rest.starts_with("::"));
            causes.push(if named { word } else { "0".to_owned() });
        }
    }
    causes
}

#[test]
fn no_error_says_what_its_cause_says_after_it() {
    let (mut seen, mut wrong) = (0, Vec::new());
    for path in sources() {
        let source = fs::read_to_string(&path).unwrap();
        for (text, fields) in variants(&source) {
            for cause in causes(fields) {
                seen += 1;
                let words: Vec<&str> = text.split(',').map(str::trim).collect();
                let shown = text.contains(&format!("{{{cause}}}")) || text.contains(&format!("{{{cause}:"));
                let passed = words.iter().skip(1).any(|word| *word == cause || *word == format!(".{cause}"));
                if shown || passed {
                    wrong.push(format!("{}: {text}", path.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "these say their cause, which follows anyway:\n{}", wrong.join("\n"));
    assert!(seen > 100, "only {seen} causes were found");
}

#[test]
fn variants_and_their_causes_are_found() {
    let source = "#[error(\"a (b) {0}\")]\n A(#[from] io::Error),\n#[error(\"c {}\", x(y))]\n B {\n #[source]\n why: E },\n}\n";
    let found: Vec<_> = variants(source).into_iter().map(|(text, fields)| (text, causes(fields))).collect();
    assert_eq!(found, [("\"a (b) {0}\"", vec!["0".to_owned()]), ("\"c {}\", x(y)", vec!["why".to_owned()])]);
}

/// What nobody may have to read twice: a cause that is part of what was said before it.
#[track_caller]
fn said_once(outcome: &Outcome) {
    let lines = outcome.stderr.lines().filter(|line| !line.is_empty() && !line.contains("ERRO: "));
    let lines: Vec<&str> = lines.map(|line| line.trim().trim_start_matches("because: ")).collect();
    for (index, line) in lines.iter().enumerate() {
        assert!(lines.iter().take(index).all(|before| !before.contains(line)), "said twice: {line}\n{outcome}");
        let parts: Vec<&str> = line.split(": ").collect();
        assert!(parts.windows(2).all(|pair| pair[0] != pair[1]), "said twice: {line}\n{outcome}");
    }
}

/// A refusal of `banyan ARGUMENTS`.
#[track_caller]
fn refusal(arguments: &[&str], parts: &[&str]) -> Outcome {
    let outcome = banyan(arguments);
    assert_ne!(outcome.code, 0, "{outcome}");
    outcome.expect_error(parts);
    assert!(!outcome.stderr.contains("panicked"), "{outcome}");
    said_once(&outcome);
    outcome
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_dry_run_refuses_what_the_start_refuses_in_the_same_words() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    fs::File::create(at("a.img")).unwrap().set_len(1 << 20).unwrap();
    fs::write(at("small"), "x").unwrap();
    let long = at(&"x".repeat(108));
    let (disk, link) = (at("a.img"), at("b.img"));
    std::os::unix::fs::symlink(&disk, &link).unwrap();
    let _listener = UnixListener::bind(at("live")).unwrap();
    for (arguments, parts) in [
        (vec!["--disk", &disk, "--disk", &link], vec!["are the same", "readonly=on"]),
        (vec!["--disk", &at("none")], vec!["disk0", "none", "No such file"]),
        (vec!["--disk", &at("small")], vec!["small", "512"]),
        (vec!["--vsock", &format!("cid=3,socket={long}")], vec!["--vsock", "at most 107"]),
        (vec!["--vsock", &format!("cid=3,socket={}", at("live"))], vec!["live", "another process listens"]),
        (vec!["--vsock", &format!("cid=3,socket={}", at("a.img"))], vec!["a.img", "no socket"]),
        (vec!["--vsock", "cid=3,socket=/nonexistent/s"], vec!["/nonexistent", "No such file"]),
        (
            vec!["--serial", &format!("socket={}", at("s")), "--console", &format!("socket={}", at("s"))],
            vec!["--console and --serial"],
        ),
        (vec!["--serial", &format!("file={disk}"), "--disk", &disk], vec!["--serial would write to", "the disk"]),
        (vec!["--serial", "file=/nonexistent/out"], vec!["/nonexistent/out", "--serial"]),
        (vec!["--serial", &format!("file={}", folder.path().display())], vec!["--serial"]),
        (vec!["--api-socket", &long], vec!["--api-socket", "at most 107"]),
        (vec!["--api-socket", &at("s"), "--vsock", &format!("cid=3,socket={}", at("s"))], vec!["--api-socket and --vsock"]),
        (vec!["--net", "lo"], vec!["interface lo is no tap"]),
        (vec!["--net", "tap%d"], vec!["`tap%d` is no name of a tap"]),
        (vec!["--net", "t0", "--net", "t0"], vec!["net0 and net1 are both on the tap t0"]),
        (vec!["--rng=/etc/passwd"], vec!["/etc/passwd"]),
        (vec!["--pcie", "root-ports=300"], vec!["300 ports", "there are 255"]),
        (vec!["--pcie", "switches=65535,switch-ports=65535"], vec!["4294967295 ports", "there are 255"]),
        (vec!["--initramfs", &at("none")], vec!["initramfs", "none", "No such file"]),
        (vec!["--cpus", "1,topology=65535:65535:65535:65535"], vec!["bits of an APIC id, which has 8"]),
        (vec!["--memory", "18446744073709551615"], vec!["memory of", "give at most"]),
        (vec!["--memory", "1G,hotplug=16777215T"], vec!["--memory hotplug at most"]),
        (vec!["--pcie", "root-ports=1,hotplug-mem=16777215T"], vec!["16777215T", "are missing"]),
        (vec!["--pcie", "root-ports=1,hotplug-mem32=999T"], vec!["999T", "at most 1536M"]),
    ] {
        let hello = image("hello.elf");
        let start = [&["run", "--kernel", &hello], &arguments[..]].concat();
        let plan = [&["run", "--dry-run", "--kernel", &hello], &arguments[..]].concat();
        let (start, plan) = (refusal(&start, &parts), refusal(&plan, &parts));
        assert_eq!(start.stderr, plan.stderr, "{arguments:?}");
        assert_eq!((start.code, plan.stdout.as_str()), (plan.code, ""), "{arguments:?}");
    }
    assert!(!Path::new(&at("s")).exists(), "a refusal leaves nothing behind");
    for missing in [["--kernel", "/nonexistent/k"], ["--firmware", "/nonexistent/f"]] {
        let plan = refusal(&[&["run", "--dry-run"], &missing[..]].concat(), &[missing[1], "No such file"]);
        assert_eq!(refusal(&[&["run"], &missing[..]].concat(), &[]).stderr, plan.stderr);
    }
}

#[test]
fn the_operator_s_file_is_checked_for_machines_that_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    for (text, parts) in [
        ("[pcie]\nroot-ports = 300\n", vec!["config.toml", "300 ports"]),
        ("[pcie]\nroot-ports = 1\nhotplug-mem32 = \"5G\"\n", vec!["config.toml", "below 4 GiB"]),
    ] {
        fs::write(&file, text).unwrap();
        refusal(&["config", "check", file.to_str().unwrap()], &parts);
    }
    fs::write(&file, "[pcie]\nroot-ports = 200\n").unwrap();
    banyan(&["config", "check", file.to_str().unwrap()]).expect_code(0);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn a_file_to_boot_that_is_missing_is_the_client_s_mistake_in_the_words_of_the_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("k").display().to_string();
    for (payload, arguments) in [
        (format!(r#"{{"kernel":"{image}"}}"#), vec!["--kernel".to_owned(), image.clone()]),
        (
            format!(r#"{{"kernel":"{}","initramfs":"{image}"}}"#, tests::guest::image("hello.elf")),
            vec!["--kernel".to_owned(), tests::guest::image("hello.elf"), "--initramfs".to_owned(), image.clone()],
        ),
    ] {
        let server = Server::empty();
        server.expect("PUT vm.create", &format!(r#"{{"payload":{payload}}}"#), 204);
        let reply = server.expect("PUT vm.boot", "", 400);
        assert!(
            server.expect("GET vm.info", "", 200).contains(r#""phase":"created""#)
                || server.expect("GET vm.info", "", 200).contains("Created")
        );
        let told = banyan(&[&["run".to_owned()], &arguments[..]].concat());
        for line in told.stderr.lines() {
            let text = line.trim().trim_start_matches("banyan: ").trim_start_matches("because: ");
            assert!(reply.contains(text), "{text} is not in {reply}");
        }
        server.shuts_down();
    }
    let server = Server::empty();
    let reply = server.expect("PUT vm.create", &format!(r#"{{"payload":{{"firmware":"{image}"}}}}"#), 400);
    assert!(reply.contains("cannot read the firmware") && reply.contains("No such file"), "{reply}");
}

#[test]
fn a_value_of_a_wrong_type_is_named_by_its_key() {
    let server = Server::empty();
    for (body, parts) in [
        (r#"{"payload":{"kernel":7}}"#, ["payload.kernel", "integer `7`", "a path"]),
        (r#"{"payload":{"kernel":"k"},"cpus":{"boot_vcpus":"two"}}"#, ["cpus.boot_vcpus", "two", "a whole number from 0 to"]),
        (r#"{"disks":[{"path":"a"},{"path":"b","readonly":"no"}]}"#, ["disks[1].readonly", "no", "true or false"]),
        (r#"{"payload":{"kernel":"k"},"net":{}}"#, ["net", "map", "a list"]),
        (r#"{"memory":{"size":-1}}"#, ["memory.size", "`-1`", "a whole number from 0"]),
        (r#"{"serial":{"mode":"Loud"}}"#, ["serial.mode", "Loud", "Off"]),
    ] {
        let reply = server.expect("PUT vm.create", body, 400);
        for part in parts {
            assert!(reply.contains(part), "{body}: {part} is not in {reply}");
        }
    }
}

#[test]
fn whoever_listens_and_says_nothing_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            std::mem::forget(stream);
        }
    });
    let socket = path.to_str().unwrap();
    let calls: Vec<_> = [
        (vec!["topology", "show", "--api-socket", socket], 1),
        (vec!["ctl", "--api-socket", socket, "ping"], 3),
        (vec!["ctl", "--api-socket", socket, "events"], 3),
        (vec!["ctl", "--api-socket", socket, "shutdown"], 3),
    ]
    .into_iter()
    .map(|(arguments, code)| (Session::start(&arguments), code))
    .collect();
    for (session, code) in calls {
        let outcome = session.finish();
        outcome.expect_code(code).expect_error(&[socket, "has not answered"]);
        said_once(&outcome);
    }
}

#[test]
fn a_host_without_functions_is_told_with_what_was_looked_for() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("bus/pci/devices")).unwrap();
    let sysfs = folder.path().to_str().unwrap();
    let file = folder.path().join("host.json");
    fs::write(&file, r#"{"banyan-host":2,"address-bits":46,"functions":[]}"#).unwrap();
    for what in [["topology", "show"], ["topology", "matrix"]] {
        refusal(&[&what[..], &["--host", sysfs]].concat(), &[sysfs, "/bus/pci/devices", "0000:00:00.0"]);
        refusal(&[&what[..], &["--host", file.to_str().unwrap()]].concat(), &["host.json", "`functions`"]);
    }
}

#[test]
fn nothing_that_others_wrote_steers_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let evil = "\\u001b[2J\\u009b1m\\u202e";
    let host = format!(
        r#"{{"banyan-host":2,"address-bits":46,"functions":[{{"at":"0000:00:00.0","root-complex":"{evil}","kind":"endpoint","ids":"10de:20b8","class":"030200","driver":"{evil}","x{evil}":1}}]}}"#
    );
    fs::write(at("host.json"), host).unwrap();
    fs::write(at("evil.toml"), "[pcie]\n\"\\u001b[2J\" = 1\n").unwrap();
    fs::write(at("tree.toml"), "[[root-complex]]\nname = \"\\u001b[2J\"\n").unwrap();
    let raw = "/nonexistent/\u{1b}[2J\u{9b}1m";
    let outcomes = [
        banyan(&["topology", "show", "--host", &at("host.json")]),
        banyan(&["check", "--host", &at("host.json"), "0000:00:00.0"]),
        banyan(&["cdi", "generate", "--host", &at("host.json"), "0000:00:00.0"]),
        banyan(&["config", "check", &at("evil.toml")]),
        banyan(&["run", "--dry-run", "--topology", &at("tree.toml")]),
        banyan(&["run", "--dry-run", "--kernel", raw]),
        banyan(&["run", "--dry-run", "--disk", raw]),
        banyan(&["run", "--dry-run", "--device", raw]),
        banyan(&["run", "--dry-run", "--fs", &format!("{raw},tag=\u{1b}[2J"), "--memory", "64M,shared=on"]),
        banyan(&["run", "--dry-run", "--cpus", "\u{1b}[2J"]),
        banyan(&["run", "--\u{1b}[2J"]),
        banyan(&["ctl", "--api-socket", raw, "ping"]),
    ];
    for outcome in outcomes {
        let steers = |text: &str| text.chars().any(|letter| letter != '\n' && (letter.is_control() || letter == '\u{202e}'));
        assert!(!steers(&outcome.stdout) && !steers(&outcome.stderr), "{:?} {:?}", outcome.stdout, outcome.stderr);
        assert!(!outcome.stdout.is_empty() || !outcome.stderr.is_empty(), "{outcome}");
    }
}

#[test]
fn commands_that_print_end_well_when_nobody_reads() {
    let folder = tempfile::tempdir().unwrap();
    let host = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/a100x-dpu.json").display().to_string();
    let cdi = folder.path().display().to_string();
    for arguments in [
        vec!["--help"],
        vec!["--version"],
        vec!["run", "--help"],
        vec!["completions", "bash"],
        vec!["topology", "show", "--host", &host],
        vec!["topology", "show", "--format", "svg", "--host", &host],
        vec!["topology", "plan", "--host", &host, "0000:41:00.0"],
        vec!["topology", "diff", "--host", &host, "0000:41:00.0"],
        vec!["topology", "matrix", "--host", &host],
        vec!["cdi", "generate", "--host", &host, "0000:41:00.0"],
        vec!["cdi", "generate", "--host", &host, "--output", &cdi, "0000:41:00.0"],
        vec!["config", "show"],
        vec!["run", "--dry-run", "--device", "stub"],
        vec!["ctl", "--api-socket", "/nonexistent", "openapi"],
    ] {
        for script in ["\"$0\" \"$@\" | :; exit ${PIPESTATUS[0]}", "exec \"$0\" \"$@\" > >(exec true)"] {
            // With and without a head start for the reader that leaves.
            for wait in ["", "sleep 0.05; "] {
                let outcome = Session::spawn(in_shell(&format!("{wait}{script}"), &arguments), LIMIT).finish();
                assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""), "{arguments:?}\n{outcome}");
            }
        }
        // A full disk is told, but where nothing but help is lost.
        let outcome = Session::spawn(in_shell("exec \"$0\" \"$@\" > /dev/full", &arguments), LIMIT).finish();
        assert!(outcome.code == 0 || outcome.stderr.contains("No space left"), "{outcome}");
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn too_few_files_are_told_of_with_what_helps() {
    let socket = tempfile::tempdir().unwrap();
    let socket = socket.path().join("s").display().to_string();
    let kernel = image("hello.elf");
    let devices = ["--device", "stub,msix=64,bar0=64K:mem64", "--rng", "--console", "pty", "--watchdog"];
    let mut told = 0;
    for files in 3..40 {
        for more in [&[][..], &["--api-socket", &socket]] {
            let arguments = [&["run", "--kernel", &kernel], &devices[..], more].concat();
            let script = format!("ulimit -n {files}; exec timeout -k 1 20 \"$0\" \"$@\"");
            let outcome = Session::spawn(in_shell(&script, &arguments), LIMIT).finish();
            assert!(!outcome.stderr.contains("panicked"), "{files}: {outcome}");
            assert!([0, 1, 127].contains(&outcome.code), "{files}: {outcome}");
            if outcome.code == 1 {
                let helps = ["ulimit -n", "Too many open files"].iter().any(|part| outcome.stderr.contains(part));
                assert!(helps, "{files}: {outcome}");
                said_once(&outcome);
                told += 1;
            }
        }
    }
    assert!(told > 10, "{told}");
    Guest::new("hello").run().expect_code(0);
}
