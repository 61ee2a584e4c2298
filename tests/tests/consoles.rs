//! Consoles that clients of the API ask for: terminals, sockets, and standard streams that are none.
#![expect(clippy::unwrap_used, reason = "helpers of tests end a test that cannot go on")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use tests::Session;
use tests::guest::image;
use tests::process::{LIMIT, in_shell};
use tests::server::{Server, listens};

/// Path of the terminal that a console is in vm.info.
fn terminal(info: &str, console: &str) -> PathBuf {
    let at = info.find(&format!(r#""{console}":{{"#)).unwrap_or_else(|| panic!("no {console}: {info}"));
    let rest = info.get(at..).unwrap_or_default();
    let path = rest.split_once(r#""file":""#).and_then(|(_, rest)| rest.split('"').next());
    path.unwrap_or_else(|| panic!("no terminal: {rest}")).into()
}

/// The user's end of a terminal, without echo and line editing, and what comes from it.
struct Client {
    typed: File,
    seen: Receiver<u8>,
    text: String,
}

impl Client {
    fn open(path: &Path) -> Self {
        let typed =
            File::options().read(true).write(true).open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut settings = tcgetattr(&typed).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        settings.make_raw();
        tcsetattr(&typed, OptionalActions::Now, &settings).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut reader = typed.try_clone().unwrap_or_else(|error| panic!("{error}"));
        let (told, seen) = mpsc::channel();
        thread::spawn(move || {
            let mut byte = [0];
            while reader.read(&mut byte).is_ok_and(|read| read == 1) && told.send(byte[0]).is_ok() {}
        });
        Self { typed, seen, text: String::new() }
    }

    /// Waits for a text.
    #[track_caller]
    fn expect(&mut self, text: &str) {
        let start = Instant::now();
        while !self.text.contains(text) {
            let left = LIMIT.saturating_sub(start.elapsed());
            match self.seen.recv_timeout(left) {
                Ok(byte) => self.text.push(char::from(byte)),
                Err(error) => panic!("no `{text}` ({error}) in: {}", self.text),
            }
        }
    }

    fn send(&mut self, text: &str) {
        self.typed.write_all(text.as_bytes()).unwrap_or_else(|error| panic!("cannot type: {error}"));
    }
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_g3_two_terminals_keep_their_input_apart_and_stay_where_they_are_through_ten_resets() {
    let server = Server::empty();
    let more = r#","serial":{"mode":"Pty"},"console":{"mode":"Pty"}"#;
    assert_eq!(server.create(&image("consoles.elf"), more).0, 204);
    server.expect("PUT vm.boot", "", 204);
    let info = server.expect("GET vm.info", "", 200);
    let paths = ["serial", "console"].map(|console| terminal(&info, console));
    assert_ne!(paths[0], paths[1]);
    let [mut serial, mut console] = paths.each_ref().map(|path| Client::open(path));
    for boot in 0..=10 {
        if boot > 0 {
            server.expect("PUT vm.reboot", "", 204);
            let info = server.expect("GET vm.info", "", 200);
            assert_eq!(["serial", "console"].map(|console| terminal(&info, console)), paths, "boot {boot}");
        }
        serial.expect("ready");
        console.expect("ready");
        // Both at once, a few bytes at a time.
        for n in 0..20 {
            for piece in ["a", "b", "c"] {
                serial.send(&format!("s{piece}{boot}.{n} "));
                console.send(&format!("v{piece}{boot}.{n} "));
            }
            serial.send("\n");
            console.send("\n");
        }
        for n in 0..20 {
            serial.expect(&format!("serial: sa{boot}.{n} sb{boot}.{n} sc{boot}.{n} "));
            console.expect(&format!("console: va{boot}.{n} vb{boot}.{n} vc{boot}.{n} "));
        }
        assert!(!serial.text.contains('v') && !console.text.contains("sa"), "{} and {}", serial.text, console.text);
        serial.text.clear();
        console.text.clear();
    }
    server.shuts_down();
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_g4_a_console_on_standard_streams_that_are_no_terminal_is_output_alone() {
    let Ok(folder) = tempfile::tempdir() else { panic!("no temporary directory") };
    let socket = folder.path().join("s");
    let start = |redirection: &str| {
        let _ = fs::remove_file(&socket);
        let command = in_shell(&format!("exec \"$0\" \"$@\" {redirection}"), &["--api-socket", &socket.display().to_string()]);
        let process = Session::spawn(command, LIMIT);
        listens(&socket);
        process
    };
    let call = |what: &str, body: &str| tests::server::call(&socket, what, body);
    let body = |kernel: &str| {
        let kernel = image(kernel);
        format!(
            r#"{{"payload":{{"kernel":"{kernel}"}},"memory":{{"size":67108864}},"console":{{"mode":"Tty"}},"serial":{{"mode":"Tty"}}}}"#
        )
    };
    // As Kata starts it: it reads standard output, and standard input is the null device.
    let mut process = start("</dev/null");
    assert_eq!(call("PUT vm.create", &body("consoles.elf")).0, 204);
    assert_eq!(call("PUT vm.boot", "").0, 204);
    process.expect("ready");
    process.expect("ready");
    for _ in 0..3 {
        assert_eq!(call("PUT vm.reboot", "").0, 204);
        process.expect("ready");
        process.expect("ready");
    }
    assert_eq!(call("PUT vmm.shutdown", "").0, 204);
    process.wait().expect_code(0);
    // Closed as a whole, the output goes nowhere, as it does for the null device.
    let process = start("</dev/null >&-");
    assert_eq!(call("PUT vm.create", &body("consoles.elf")).0, 204);
    assert_eq!(call("PUT vm.boot", "").0, 204);
    assert_eq!(call("PUT vmm.shutdown", "").0, 204);
    process.wait().expect_code(0);
    // A standard output that cannot be written to.
    let process = start("</dev/null 1</dev/null");
    let (created, reply) = call("PUT vm.create", &body("consoles.elf"));
    let (status, reply) = if created == 204 { call("PUT vm.boot", "") } else { (created, reply) };
    assert!(status == 400 && reply.contains("standard input and output"), "{created} {status} {reply}");
    assert_eq!(call("GET vmm.ping", "").0, 200);
    assert_eq!(call("PUT vmm.shutdown", "").0, 204);
    process.wait().expect_code(0);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_g1_a_guest_that_prints_1_mib_into_a_terminal_that_nobody_reads_waits_for_nobody() {
    // Without the debug exit, so that the process stays when everything is printed.
    let (kernel, lines) = (image("flood.elf"), 16384);
    let options = format!("lines={lines}");
    let arguments = ["run", "--kernel", &kernel, "--cmdline", &options, "--serial", "pty", "--debug-console", "stdio"];
    let mut session = Session::start(&arguments);
    session.expect("flood over");
    // A few are for locks and memory.
    let waits = waits(&session, "vcpu0");
    assert!(waits < lines / 8, "{waits} times for {lines} lines");
}

/// How often a thread of a process has waited for anything.
fn waits(process: &Session, thread: &str) -> u64 {
    let mut tasks = fs::read_dir(format!("/proc/{}/task", process.id())).unwrap().map(|task| task.unwrap().path());
    let task = tasks.find(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == thread)).unwrap();
    let status = fs::read_to_string(task.join("status")).unwrap();
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.unwrap_or_else(|| panic!("{status}")).trim().parse().unwrap()
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_g2_what_is_printed_before_a_client_comes_and_between_two_arrives_once_and_in_order() {
    let Ok(folder) = tempfile::tempdir() else { panic!("no temporary directory") };
    let socket = folder.path().join("s");
    let server = Server::empty();
    let (kernel, path) = (image("flood.elf"), socket.display());
    let body = format!(
        r#"{{"payload":{{"kernel":"{kernel}","cmdline":"lines=3000"}},"memory":{{"size":67108864}},"serial":{{"mode":"Socket","socket":"{path}"}}}}"#
    );
    server.expect("PUT vm.create", &body, 204);
    server.expect("PUT vm.boot", "", 204);
    let come = || {
        // The guest prints while nobody is there.
        thread::sleep(Duration::from_millis(50));
        let client = UnixStream::connect(&socket).unwrap();
        client.set_read_timeout(Some(LIMIT)).unwrap();
        client
    };
    let (mut all, whole, mut buffer) = (Vec::new(), 3000 * 64, vec![0; 4096]);
    let mut take = |mut client: &UnixStream, all: &mut Vec<u8>| {
        let count = client.read(&mut buffer).unwrap_or(0);
        all.extend(buffer.get(..count).unwrap_or_default());
        count > 0
    };
    // The first leaves amid the text, when it has all that the guest, which is held, has printed.
    let first = come();
    assert!(take(&first, &mut all), "nothing came");
    server.expect("PUT vm.pause", "", 204);
    first.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    while take(&first, &mut all) {}
    drop(first);
    assert!(all.len() < whole, "the first client got everything");
    server.expect("PUT vm.resume", "", 204);
    let second = come();
    while all.len() < whole && take(&second, &mut all) {}
    let text = String::from_utf8_lossy(&all);
    let numbers: Vec<u32> =
        text.lines().filter_map(|line| line.strip_prefix("line ")?.trim().split(' ').next()?.parse().ok()).collect();
    assert_eq!(numbers.len(), 3000, "{} bytes", all.len());
    assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1));
}

/// A pipe that is full and that nobody reads, at `path`, which `fd` of a shell stays open for.
fn full_pipe(path: &Path, fd: u8) -> String {
    let path = path.display();
    format!("mkfifo '{path}' && exec {fd}<>'{path}' && head -c 65536 /dev/zero >&{fd}")
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn case_g1_a_log_that_nobody_reads_holds_up_no_command_and_no_end() {
    let Ok(folder) = tempfile::tempdir() else { panic!("no temporary directory") };
    let socket = folder.path().join("s");
    // As where a client's debug output is one terminal for both streams, whose reader has ended.
    let script = full_pipe(&folder.path().join("pipe"), 3) + r#" && exec "$0" "$@" >&3 2>&3"#;
    let process = Session::spawn(in_shell(&script, &["-vv", "--api-socket", &socket.display().to_string()]), LIMIT);
    let call = |what: &str, body: &str| tests::server::call(&socket, what, body).0;
    listens(&socket);
    let kernel = image("flood.elf");
    let body = format!(
        r#"{{"payload":{{"kernel":"{kernel}","cmdline":"lines=4096"}},"memory":{{"size":67108864}},"serial":{{"mode":"Tty"}}}}"#
    );
    assert_eq!(call("PUT vm.create", &body), 204);
    assert_eq!(call("PUT vm.boot", ""), 204);
    for _ in 0..10 {
        assert_eq!(call("PUT vm.reboot", ""), 204);
        assert_eq!(call("GET vmm.ping", ""), 200);
    }
    assert_eq!(call("PUT vmm.shutdown", ""), 204);
    process.wait().expect_code(0);
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn what_is_said_last_reaches_a_reader_that_is_slow() {
    let Ok(folder) = tempfile::tempdir() else { panic!("no temporary directory") };
    let pipe = folder.path().join("pipe");
    let script = full_pipe(&pipe, 3) + r#" && echo full && exec "$0" "$@" 2>&3"#;
    let mut process = Session::spawn(in_shell(&script, &["run", "--kernel", "/nowhere/kernel"]), LIMIT);
    process.expect("full");
    let mut reader = File::open(&pipe).unwrap();
    thread::sleep(Duration::from_millis(100));
    let mut said = Vec::new();
    reader.read_to_end(&mut said).unwrap();
    process.wait().expect_code(1);
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("banyan: ") && said.contains("/nowhere/kernel"), "{}", said.trim_start_matches('\0'));
}
