use std::io::Write as _;
use std::path::Path;

use api::config::{
    Cf8, DeviceConfig, DeviceKind, KernelConfig, LogLevel, OutputConfig, Payload, PcieConfig, Size, TopologyPolicy,
};
use clap::error::ErrorKind;

use super::*;

fn parsed(arguments: &str) -> Result<Action, CliError> {
    parse(std::iter::once("banyan").chain(arguments.split_whitespace()).map(OsString::from))
}

fn run(arguments: &str) -> (VmConfig, RunOptions) {
    match parsed(&format!("run {arguments}")) {
        Ok(Action::Run { config, options }) => (*config, options),
        other => panic!("{arguments}: {other:?}"),
    }
}

fn usage_error(arguments: &str) -> (ErrorKind, String) {
    match parsed(arguments) {
        Err(CliError::Usage(error)) => (error.kind(), error.to_string()),
        other => panic!("{arguments}: {other:?}"),
    }
}

#[test]
fn the_definitions_hold_together() {
    Cli::command().debug_assert();
}

#[test]
fn the_help_of_events_names_all_that_clients_are_told() {
    let document = api::http::DOCUMENT;
    let event = document.split_once("\n    Event:\n").unwrap().1;
    let names = event.split_once("enum: [").unwrap().1.split_once(']').unwrap().0;
    let names: Vec<&str> = names.split(',').map(str::trim).collect();
    assert!(names.contains(&"device-requested") && names.contains(&"lost"), "{names:?}");
    let (_, help) = usage_error("ctl events --help");
    let words: Vec<&str> = help.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').collect();
    for name in names {
        assert!(words.contains(&name), "{name} is missing: {help}");
    }
}

#[test]
fn a_glance_tells_command_lines_that_start_a_machine_at_once() {
    let starts = |line: &str| starts_a_machine(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>());
    assert!(starts("banyan run --kernel k --cmdline x=--help"));
    for line in [
        "banyan",
        "banyan --api-socket s",
        "banyan demo",
        "banyan ctl run",
        "banyan run --help",
        "banyan run -h",
        "banyan run --kernel k --dry-run",
        "banyan run --kernel k --api-socket s",
        "banyan run --kernel k --api-socket=s",
    ] {
        assert!(!starts(line), "{line}");
    }
}

#[test]
fn a_kernel_alone_gets_the_documented_defaults() {
    let (config, options) = run("--kernel k");
    let kernel = KernelConfig { path: "k".into(), ..KernelConfig::default() };
    assert_eq!(config, VmConfig { payload: Some(Payload::Kernel(kernel)), ..VmConfig::default() });
    assert_eq!(options, RunOptions::default());
}

#[test]
fn every_flag_reaches_the_configuration() {
    let (config, options) =
        run("--kernel k --initramfs i --cmdline -q --load-address 32M --cpus 4 --memory 2G,shared=on --serial off \
         --device 0000:03:00.0 --device stub,id=a --pcie topology=host,cf8=on --disk a.img --disk b.img,readonly=on \
         --cdi-dir /a --cdi-dir b --log level=debug,file=l --no-reboot --counters --debug-exit --debug-console file=d");
    let kernel =
        KernelConfig { path: "k".into(), initramfs: Some("i".into()), cmdline: "-q".to_owned(), load_address: Some(32 << 20) };
    assert_eq!(config.payload, Some(Payload::Kernel(kernel)));
    assert_eq!((config.cpus.count, config.memory.size, config.memory.shared), (4, Size(2 << 30), true));
    assert_eq!((config.serial, config.debug_console), (OutputConfig::Off, Some(OutputConfig::File("d".into()))));
    assert!(matches!(
        config.devices.as_slice(),
        [DeviceConfig { kind: DeviceKind::Vfio(_), .. }, DeviceConfig { kind: DeviceKind::Stub(_), .. }]
    ));
    assert_eq!(config.pcie, PcieConfig { topology: TopologyPolicy::Host, cf8: Cf8::On, ..PcieConfig::default() });
    assert_eq!(config.disks.iter().map(|disk| disk.readonly).collect::<Vec<_>>(), [false, true]);
    assert_eq!(config.cdi_dirs, [Path::new("/a"), Path::new("b")]);
    let log = LogConfig { level: LogLevel::Debug, file: Some("l".into()) };
    assert_eq!(
        options,
        RunOptions {
            dry_run: false,
            verbose: false,
            counters: true,
            no_reboot: true,
            time_limit: None,
            log,
            api_socket: None,
            host: None
        }
    );
    assert!(config.debug_exit);
}

#[test]
fn a_dry_run_needs_no_kernel() {
    let (config, options) = run("--dry-run -v");
    assert_eq!(config.payload, None);
    assert!(options.dry_run && options.verbose);
}

#[test]
fn flags_that_need_or_exclude_each_other_are_named() {
    for (arguments, kind, part) in [
        ("run", ErrorKind::MissingRequiredArgument, "--kernel"),
        ("run --initramfs i --dry-run", ErrorKind::MissingRequiredArgument, "--kernel"),
        ("run --initramfs i --firmware f", ErrorKind::ArgumentConflict, "--initramfs"),
        ("run --kernel k --firmware f", ErrorKind::ArgumentConflict, "--firmware"),
        ("run --kernel k -v", ErrorKind::MissingRequiredArgument, "--dry-run"),
        ("run --kernel k --memory 1G --memory 2G", ErrorKind::ArgumentConflict, "--memory"),
        ("run --kernel k --cpus 256", ErrorKind::ValueValidation, "from 1 to 255"),
        ("run --kernel k --memory 1G,sise=2", ErrorKind::ValueValidation, "did you mean `size`?"),
        ("run --kernel k --load-address top", ErrorKind::ValueValidation, "`top` is no size"),
        ("run --kernel k --debug-console pts", ErrorKind::ValueValidation, "`pts` is no place"),
        ("run --kernel k --device 03:00.0,clique=16", ErrorKind::ValueValidation, "cliques are 0 to 15"),
        ("run --kernal k", ErrorKind::UnknownArgument, "--kernel"),
        ("start", ErrorKind::InvalidSubcommand, "start"),
        ("completions csh", ErrorKind::InvalidValue, "csh"),
    ] {
        let (found, text) = usage_error(arguments);
        assert_eq!(found, kind, "{arguments}: {text}");
        assert!(text.contains(part), "{arguments}: {text}");
    }
}

#[test]
fn a_topology_file_is_read_and_its_faults_are_named() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    writeln!(file, "[[root-complex]]\nname = \"rc0\"").unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    assert!(run(&format!("--dry-run --topology {path}")).0.topology.is_some());
    writeln!(file, "colour = 1").unwrap();
    let error = parsed(&format!("run --dry-run --topology {path}")).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{path}, line 3: ")), "{error}");
    let error = parsed("run --dry-run --topology /nowhere/a.toml").unwrap_err().to_string();
    assert!(error.starts_with("topology file /nowhere/a.toml cannot be read"), "{error}");
}

#[test]
fn the_help_of_run_names_every_key_default_and_exit_code() {
    let (kind, text) = usage_error("run --help");
    assert_eq!(kind, ErrorKind::DisplayHelp);
    for part in [
        "[default: 512M]",
        "[default: stdio]",
        "hugepages=off|2M|1G",
        "clique=0..15",
        "topology=host",
        "Exit codes:",
        "triple fault",
        "128+S",
        "Examples:",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    for argument in Cli::command().find_subcommand("run").unwrap().get_arguments() {
        assert!(argument.get_help().is_some(), "{} has no help", argument.get_id());
    }
}

#[test]
fn completion_scripts_know_commands_and_flags() {
    for shell in [Shell::Bash, Shell::Elvish, Shell::Fish, Shell::PowerShell, Shell::Zsh] {
        let script = completions(shell);
        for word in ["run", "demo", "completions", "dry-run", "initramfs", "load-address"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
}

/// The commands in a text, with the shell's line continuations and quotes taken away.
fn commands(text: &str) -> Vec<String> {
    let text = text.replace(",\\\n", ",").replace("\\\n", " ").replace("$(uname -r)", "6").replace('\'', "");
    let lines = text.lines().map(|line| line.split(" #").next().unwrap_or_default().trim_end_matches([' ', '&']));
    lines
        .flat_map(|line| line.split(" && ").map(str::trim))
        .filter_map(|line| line.strip_prefix("banyan ").or(line.strip_prefix("cargo run --release -- ")))
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_examples_in_the_help_and_the_documents_are_valid() {
    let readme = include_str!("../../../README.md");
    let kata = include_str!("../../../docs/kata.md");
    let topology = include_str!("../../../docs/topology.md");
    let cdi = include_str!("../../../resources/cdi/README.md");
    let files = include_str!("../../../resources/topologies/README.md");
    let documents = [(readme, 6), (kata, 11), (topology, 2), (cdi, 2), (files, 3)];
    for (text, count) in [(OVERVIEW, 2), (RUN_NOTES, 4), (ctl::NOTES, 5)].into_iter().chain(documents) {
        let examples = commands(text);
        assert_eq!(examples.len(), count, "{text}");
        for example in examples {
            // Tests run in the folder of their crate, documents speak of the one above.
            match parsed(&example.replace(" resources/", " ../resources/")) {
                Ok(_) => {}
                Err(CliError::Usage(error)) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {}
                Err(error) => panic!("{example}: {error}"),
            }
        }
    }
}

fn topology(arguments: &str) -> TopologyCommand {
    match parsed(&format!("topology {arguments}")) {
        Ok(Action::Topology(options)) => options.command,
        other => panic!("{arguments}: {other:?}"),
    }
}

#[test]
fn topology_commands_take_a_recorded_host_and_devices() {
    assert_eq!(topology("record"), TopologyCommand::Record);
    assert_eq!(
        topology("show --host h.json"),
        TopologyCommand::Show { format: Format::Tree, host: Some("h.json".into()), api_socket: None }
    );
    let TopologyCommand::Plan { format, guest, devices } =
        topology("plan --format svg 03:00.0,clique=1 04:00.0 --pcie topology=flat")
    else {
        panic!("no plan")
    };
    assert_eq!((format, devices.len(), guest.host), (Format::Svg, 2, None));
    assert_eq!(guest.pcie.map(|pcie| pcie.topology), Some(TopologyPolicy::Flat));
    assert!(matches!(topology("matrix"), TopologyCommand::Matrix { devices, .. } if devices.is_empty()));
    assert_eq!(usage_error("topology plan").0, ErrorKind::MissingRequiredArgument);
    for command in ["plan", "diff"] {
        // Ports are enough to be asked about.
        topology(&format!("{command} --pcie host,host-ports=all"));
    }
    assert_eq!(usage_error("topology show --format png").0, ErrorKind::InvalidValue);
}

#[test]
fn a_recorded_host_stands_for_this_one() {
    assert_eq!(run("--dry-run --host h.json").1.host, Some("h.json".into()));
    assert_eq!(run("--kernel k --host h.json").1.host, Some("h.json".into()));
}

#[test]
fn the_configuration_file_can_be_checked_and_shown() {
    let Ok(Action::Config(ConfigOptions { command: ConfigCommand::Check { file } })) = parsed("config check f.toml") else {
        panic!("no check")
    };
    assert_eq!(file.as_deref(), Some(Path::new("f.toml")));
    assert!(matches!(parsed("config show"), Ok(Action::Config(ConfigOptions { command: ConfigCommand::Show { file: None } }))));
}

#[test]
fn a_machine_without_anything_to_boot_is_told_all_that_it_could_have() {
    let Err(CliError::Usage(error)) = parsed("run --memory 1G") else { panic!("it has nothing to boot") };
    let told = error.to_string();
    assert!(told.contains("--kernel <FILE>|--firmware <FILE>|--dry-run"), "{told}");
    for enough in ["--kernel k", "--firmware f", "--dry-run", "--dry-run --kernel k"] {
        assert!(parsed(&format!("run {enough}")).is_ok(), "{enough}");
    }
}
