//! Starts the executable with a time limit, talks to it, and collects output and exit code.

use std::fmt::Debug;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::executable;

/// Longest time that a test waits for anything, if it does not say otherwise. Generous: build machines are slow.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Looks each few milliseconds until it sees what `is` right, and returns that; panics after [`LIMIT`] with what was seen last.
#[track_caller]
pub fn until<T: Debug>(what: &str, mut look: impl FnMut() -> T, is: impl Fn(&T) -> bool) -> T {
    let start = Instant::now();
    loop {
        let seen = look();
        if is(&seen) {
            return seen;
        }
        assert!(start.elapsed() < LIMIT, "no {what} in {LIMIT:?}, but {seen:?}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Runs `banyan ARGUMENTS` to its end, with nothing on standard input.
pub fn banyan<S: AsRef<str>>(arguments: &[S]) -> Outcome {
    Session::start(arguments).finish()
}

/// A command that runs `script` in a shell with the executable as `$0` and `arguments` as `"$@"`: for redirections and for
/// surroundings that a test cannot make itself. Write `exec "$0" "$@"` to start Banyan in the shell's place.
pub fn in_shell<S: AsRef<str>>(script: &str, arguments: &[S]) -> Command {
    let mut command = Command::new("bash");
    command.arg("-c").arg(script).arg(executable::path());
    command.args(arguments.iter().map(AsRef::as_ref));
    command
}

/// Whether a process has root's capabilities, at least in its own namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capabilities {
    /// All of them.
    All,
    /// None: permissions and limits count.
    None,
}

/// Runs `banyan ARGUMENTS` in a mount namespace of its own, after the shell command `prepare`.
pub fn with_other_mounts<S: AsRef<str>>(prepare: &str, capabilities: Capabilities, arguments: &[S]) -> Outcome {
    let drop = match capabilities {
        Capabilities::All => "",
        Capabilities::None => "setpriv --bounding-set=-all --inh-caps=-all",
    };
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-c", &format!("{prepare} && exec {drop} \"$0\" \"$@\"")]).arg(executable::path());
    command.args(arguments.iter().map(AsRef::as_ref));
    Session::spawn(command, LIMIT).finish()
}

/// How a process ended, and what it printed.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The command, for messages.
    pub command: String,
    /// Exit code, or 128 plus the signal that ended it.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Outcome {
    /// Panics with all output unless the exit code is `code`.
    #[track_caller]
    pub fn expect_code(&self, code: i32) -> &Self {
        assert!(self.code == code, "exit code {} instead of {code}\n{self}", self.code);
        self
    }

    /// Panics unless standard error contains every one of `parts`.
    #[track_caller]
    pub fn expect_error(&self, parts: &[&str]) -> &Self {
        for part in parts {
            assert!(self.stderr.contains(part), "standard error lacks `{part}`\n{self}");
        }
        self
    }

    /// Panics unless standard output contains every one of `parts`.
    #[track_caller]
    pub fn expect_output(&self, parts: &[&str]) -> &Self {
        for part in parts {
            assert!(self.stdout.contains(part), "standard output lacks `{part}`\n{self}");
        }
        self
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "$ {}\n--- standard output\n{}\n--- standard error\n{}", self.command, self.stdout, self.stderr)
    }
}

/// A running process. Dropping it ends it.
#[derive(Debug)]
pub struct Session {
    command: String,
    child: Child,
    stdin: Option<File>,
    pipes: Receiver<(Pipe, Vec<u8>)>,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// Up to here `expect` has looked.
    seen: usize,
    deadline: Instant,
}

#[derive(Debug, Clone, Copy)]
enum Pipe {
    Out,
    Err,
}

impl Session {
    /// Starts `banyan ARGUMENTS`, which has [`LIMIT`] to end.
    pub fn start<S: AsRef<str>>(arguments: &[S]) -> Self {
        let mut command = Command::new(executable::path());
        command.args(arguments.iter().map(AsRef::as_ref));
        Self::spawn(command, LIMIT)
    }

    /// Starts any command.
    #[must_use]
    pub fn spawn(mut command: Command, limit: Duration) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self::with_ends(command, limit, None)
    }

    /// Starts a command whose standard input and output may have another end than pipes: `terminal`.
    pub(crate) fn with_ends(mut command: Command, limit: Duration, terminal: Option<(File, File)>) -> Self {
        let text = format!("{command:?}");
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{text} cannot be started: {error}"));
        // The command holds the child's ends of what it was given.
        drop(command);
        let (input, output) = terminal.unzip();
        let (sender, pipes) = mpsc::channel();
        if let Some(out) = output.or_else(|| child.stdout.take().map(|pipe| File::from(OwnedFd::from(pipe)))) {
            forward(out, Pipe::Out, sender.clone());
        }
        if let Some(err) = child.stderr.take() {
            forward(err, Pipe::Err, sender);
        }
        Self {
            command: text,
            stdin: input.or_else(|| child.stdin.take().map(|pipe| File::from(OwnedFd::from(pipe)))),
            child,
            pipes,
            stdout: Vec::new(),
            stderr: Vec::new(),
            seen: 0,
            deadline: Instant::now() + limit,
        }
    }

    /// Process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Writes to its standard input.
    pub fn send(&mut self, text: &str) {
        let sent = self.stdin.as_mut().map(|stdin| stdin.write_all(text.as_bytes()).and_then(|()| stdin.flush()));
        assert!(matches!(sent, Some(Ok(()))), "`{text}` cannot be sent: {sent:?}\n{}", self.so_far());
    }

    /// Waits until standard output contains `text` behind what an earlier call found, and returns what is in front of it.
    pub fn expect(&mut self, text: &str) -> String {
        loop {
            let fresh = self.stdout.get(self.seen..).unwrap_or_default();
            if let Some(at) = fresh.windows(text.len()).position(|window| window == text.as_bytes()) {
                let before = String::from_utf8_lossy(fresh.get(..at).unwrap_or_default()).into_owned();
                self.seen += at + text.len();
                return before;
            }
            assert!(self.receive(), "`{text}` was not printed before the end or the time limit\n{}", self.so_far());
        }
    }

    /// Whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Resident memory without pages of files, KiB; 0 when it has ended. Code comes and goes as it is used.
    #[must_use]
    pub fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id())).unwrap_or_default();
        let parts = status.lines().filter_map(|line| line.strip_prefix("RssAnon:").or_else(|| line.strip_prefix("RssShmem:")));
        parts.filter_map(|part| part.split_whitespace().next()?.parse::<u64>().ok()).sum()
    }

    /// Number of open descriptors, and of threads.
    #[must_use]
    pub fn usage(&self) -> Option<(usize, usize)> {
        let count = |what| Some(std::fs::read_dir(format!("/proc/{}/{what}", self.id())).ok()?.count());
        Some((count("fd")?, count("task")?)).filter(|(descriptors, _)| *descriptors > 0)
    }

    /// Waits until no more descriptors are open than `before`.
    #[track_caller]
    pub fn falls_to(&self, before: usize) {
        until(
            &format!("end of descriptors above {before}"),
            || self.usage(),
            |usage| usage.is_none_or(|(open, _)| open <= before),
        );
    }

    /// The same without the descriptors of standard error, of which the log opens one with its first line.
    #[must_use]
    pub fn usage_without_log(&self) -> Option<(usize, usize)> {
        let folder = format!("/proc/{}/fd", self.id());
        let standard_error = std::fs::read_link(format!("{folder}/2")).ok()?;
        let targets = std::fs::read_dir(&folder).ok()?.flatten().map(|entry| std::fs::read_link(entry.path()));
        let others = targets.filter(|target| target.as_ref().ok() != Some(&standard_error)).count();
        self.usage().map(|(_, threads)| (others, threads))
    }

    /// Processor time that the main thread has used.
    #[must_use]
    pub fn processor_time(&self) -> Duration {
        let path = format!("/proc/{0}/task/{0}/schedstat", self.id());
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        Duration::from_nanos(text.split(' ').next().and_then(|count| count.parse().ok()).unwrap_or(u64::MAX))
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        let sent = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).map(|id| kill_process(id, signal));
        assert!(matches!(sent, Some(Ok(()))), "{signal:?} cannot be sent: {sent:?}\n{}", self.so_far());
    }

    /// Closes its standard input and waits for its end.
    #[must_use]
    pub fn finish(mut self) -> Outcome {
        self.stdin = None;
        self.wait()
    }

    /// Waits for its end, with its standard input open.
    #[must_use]
    pub fn wait(mut self) -> Outcome {
        while self.receive() {}
        let status = self.status();
        Outcome { code: status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(-1), ..self.so_far() }
    }

    /// Takes in more output; false when there is no more. Panics at the time limit.
    fn receive(&mut self) -> bool {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.pipes.recv_timeout(left) {
            Ok((Pipe::Out, bytes)) => self.stdout.extend(bytes),
            Ok((Pipe::Err, bytes)) => self.stderr.extend(bytes),
            Err(RecvTimeoutError::Disconnected) => return false,
            Err(RecvTimeoutError::Timeout) => panic!("still running at the time limit\n{}", self.so_far()),
        }
        true
    }

    fn status(&mut self) -> ExitStatus {
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return status,
                Ok(None) if Instant::now() < self.deadline => thread::sleep(Duration::from_millis(5)),
                other => panic!("no end before the time limit: {other:?}\n{}", self.so_far()),
            }
        }
    }

    fn so_far(&self) -> Outcome {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Outcome { command: self.command.clone(), code: -1, stdout: text(&self.stdout), stderr: text(&self.stderr) }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn forward(mut from: impl Read + Send + 'static, pipe: Pipe, to: mpsc::Sender<(Pipe, Vec<u8>)>) {
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            let bytes = buffer.get(..length).unwrap_or_default().to_vec();
            if to.send((pipe, bytes)).is_err() {
                break;
            }
        }
    });
}
