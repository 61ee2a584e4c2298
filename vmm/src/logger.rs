//! Writes log records to standard error or a file, one line each.
//!
//! Levels are written as `ERRO:`, `WARN:`, `INFO:`, `DEBG:` and `TRCE:`, which Kata Containers finds in lines of standard error.

use std::fs::File;
use std::io::{self, Write};
use std::sync::OnceLock;
use std::time::Instant;

use log::{Level, LevelFilter, Log, Metadata, Record};

use crate::print::one_line;

struct Logger {
    start: Instant,
    file: Option<File>,
}

static LOGGER: OnceLock<Logger> = OnceLock::new();

/// Starts logging. Only the first call has an effect.
pub fn start(level: LevelFilter, file: Option<File>) {
    let logger = LOGGER.get_or_init(|| Logger { start: Instant::now(), file });
    if log::set_logger(logger).is_ok() {
        log::set_max_level(level);
    }
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
        // A log that cannot be written has nowhere to say so.
        let _ = match &self.file {
            Some(file) => (&*file).write_all(line.as_bytes()),
            None => io::stderr().write_all(line.as_bytes()),
        };
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
