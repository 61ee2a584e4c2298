//! Writes log records to standard error or a file, one line each, and what else is said on standard error.
//!
//! Levels are written as `ERRO:`, `WARN:`, `INFO:`, `DEBG:` and `TRCE:`, which Kata Containers finds in lines of standard error.

use std::fs::File;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use devices::legacy::Output;
use log::{Level, LevelFilter, Log, Metadata, Record};
use rustix::io::Errno;
use rustix::stdio::stderr;

use crate::lines::Lines;
use crate::print::one_line;

/// How long the end of the process waits for readers of what was said last.
const LAST_WORDS: Duration = Duration::from_millis(500);

struct Logger {
    start: Instant,
    file: Option<Lines>,
}

static LOGGER: OnceLock<Logger> = OnceLock::new();
/// Made when there is something to say; `None` if it is no descriptor.
static STANDARD_ERROR: OnceLock<Option<Lines>> = OnceLock::new();

/// Starts logging. Only the first call has an effect.
pub fn start(level: LevelFilter, file: Option<File>) -> Result<(), Errno> {
    let file = file.map(|file| Output::new(file.into())).transpose()?.map(Lines::new);
    let logger = LOGGER.get_or_init(|| Logger { start: Instant::now(), file });
    if log::set_logger(logger).is_ok() {
        log::set_max_level(level);
    }
    Ok(())
}

/// Makes ready what lines of the log need, for a process that may lack descriptors when it has something to say.
pub fn prepare() {
    let _ = standard_error();
}

/// Writes `text` to standard error, as the log is: whoever does not read it holds nobody up.
pub fn say(text: &str) {
    if let Some(lines) = standard_error() {
        lines.write(text);
    }
}

/// Has what was said arrive where somebody reads. Waits for a moment at most.
pub fn finish() {
    let deadline = Instant::now() + LAST_WORDS;
    let file = LOGGER.get().and_then(|logger| logger.file.as_ref());
    let all = file.into_iter().chain(STANDARD_ERROR.get().and_then(Option::as_ref));
    all.for_each(|lines| lines.drain(deadline));
}

fn standard_error() -> Option<&'static Lines> {
    STANDARD_ERROR.get_or_init(|| Output::standing(stderr()).ok().map(Lines::new)).as_ref()
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let level = tag(record.level());
        let text = match &self.file {
            Some(_) => format!("{:.6} {level}: {}: {}", self.start.elapsed().as_secs_f64(), record.target(), record.args()),
            None => format!("banyan: {level}: {}", record.args()),
        };
        let line = one_line(&text).into_owned() + "\n";
        match &self.file {
            Some(file) => file.write(&line),
            None => say(&line),
        }
    }

    fn flush(&self) {}
}

const fn tag(level: Level) -> &'static str {
    match level {
        Level::Error => "ERRO",
        Level::Warn => "WARN",
        Level::Info => "INFO",
        Level::Debug => "DEBG",
        Level::Trace => "TRCE",
    }
}
