//! What the command line says when it is used wrongly, and what it explains when asked.

use tests::banyan;

#[test]
fn wrong_usage_ends_with_exit_code_2_and_names_the_fault() {
    for (arguments, parts) in [
        (vec!["start"], vec!["start", "--help"]),
        (vec!["run"], vec!["--kernel <FILE>"]),
        (vec!["run", "--kernel", "k", "--colour", "red"], vec!["--colour"]),
        (vec!["run", "--kernel", "k", "--firmware", "f"], vec!["--kernel", "--firmware"]),
        (vec!["run", "--kernel", "k", "--cpus", "0"], vec!["--cpus", "`0`", "from 1 to 255"]),
        (vec!["run", "--kernel", "k", "--cpus", "256"], vec!["--cpus", "`256`", "from 1 to 255"]),
        (vec!["run", "--kernel", "k", "--cpus", "-1"], vec!["--cpus", "`-1`", "from 1 to 255"]),
        (vec!["run", "--kernel", "k", "--memory", "-1"], vec!["--memory", "`-1` is no size"]),
        (vec!["run", "--kernel", "k", "--memory", ""], vec!["--memory", "size="]),
        (vec!["run", "--kernel", "k", "--memory", "lots"], vec!["--memory", "key `size`", "`lots` is no size", "512M"]),
        (vec!["run", "--kernel", "k", "--memory", "99999999T"], vec!["--memory", "too large", "16777216T"]),
        (
            vec!["run", "--kernel", "k", "--memory", "1G,shraed=on"],
            vec!["--memory", "`shraed`", "did you mean `shared`?", "prefault"],
        ),
        (vec!["run", "--kernel", "k", "--memory", "1G,size=2G"], vec!["--memory", "`size` is given twice"]),
        (vec!["run", "--kernel", "k", "--serial", "pts"], vec!["--serial", "`pts`", "file=PATH"]),
        (vec!["run", "--kernel", "k", "--device", "03:00.0,clique=16"], vec!["--device", "clique 16", "0 to 15"]),
        (vec!["run", "--kernel", "k", "--device", "stub,bar0=16M"], vec!["--device", "key `bar0`", "mem32, mem64 or io"]),
        (vec!["run", "--kernel", "k", "--pcie", "topology=hots"], vec!["--pcie", "did you mean `host`?"]),
        (vec!["run", "--kernel", "k", "--disk", "readonly=on"], vec!["--disk", "key `path` is missing"]),
        (vec!["completions", "csh"], vec!["csh", "bash"]),
    ] {
        banyan(&arguments).expect_code(2).expect_error(&parts);
    }
}

#[test]
fn help_and_version_end_with_exit_code_0() {
    banyan(&["--help"]).expect_code(0).expect_output(&["run", "demo", "completions", "banyan demo"]);
    banyan(&["run", "--help"]).expect_code(0).expect_output(&["Exit codes:", "Examples:", "topology=host"]);
    let version = banyan(&["--version"]);
    assert_eq!(version.expect_code(0).stdout, format!("banyan v{}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_topology_file_that_cannot_be_used_ends_with_exit_code_1() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.toml");
    let name = path.to_str().unwrap();
    let dry_run = || banyan(&["run", "--dry-run", "--topology", name]);
    dry_run().expect_code(1).expect_error(&[name, "cannot be read", "No such file"]);
    std::fs::write(&path, "[[root-complex]]\nname = \"rc0\"\ncolour = 1\n").unwrap();
    dry_run().expect_code(1).expect_error(&[name, "line 3", "`colour`", "`segment`"]);
    std::fs::write(&path, b"\xFF\xFE").unwrap();
    dry_run().expect_code(1).expect_error(&[name, "cannot be read", "UTF-8"]);
}

#[test]
fn a_completion_script_is_one_that_bash_can_read() {
    let script = banyan(&["completions", "bash"]);
    script.expect_code(0).expect_output(&["--initramfs", "completions"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("banyan.bash");
    std::fs::write(&path, &script.stdout).unwrap();
    let checked = std::process::Command::new("bash").arg("-n").arg(&path).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}

#[test]
fn a_closed_output_is_no_crash() {
    // The reader takes one byte and leaves: the rest of the script meets a broken pipe.
    let command = format!("'{}' completions zsh | head -c 1", tests::executable::path().display());
    let outcome = std::process::Command::new("bash").args(["-o", "pipefail", "-c", &command]).output().unwrap();
    let stderr = String::from_utf8_lossy(&outcome.stderr);
    assert!(!stderr.contains("panicked"), "{stderr}");
}
