//! Hears what happens to a machine (`GET vm.events`).

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use crate::process::LIMIT;
use crate::server::Server;

/// Somebody who listens.
#[derive(Debug)]
pub struct Listener(BufReader<UnixStream>);

impl Listener {
    /// Listens from now on: the phase of this moment was heard.
    #[must_use]
    pub fn new(server: &Server) -> Self {
        let mut stream = UnixStream::connect(server.socket()).unwrap_or_else(|error| panic!("nobody tells: {error}"));
        // Never fails for a time that is not zero.
        let _ = stream.set_read_timeout(Some(LIMIT));
        let asked = stream.write_all(b"GET /api/v1/vm.events HTTP/1.1\r\nHost: x\r\n\r\n");
        asked.unwrap_or_else(|error| panic!("nobody tells: {error}"));
        let mut listener = Self(BufReader::new(stream));
        listener.hears(r#""event":"phase""#);
        listener
    }

    fn next(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            match self.0.read_line(&mut line) {
                Ok(0) => return None,
                // Behind the head of the reply, and between the sizes of its pieces.
                Ok(_) if line.starts_with('{') => return Some(line),
                Ok(_) => {}
                Err(error) => panic!("nothing is told: {error}"),
            }
        }
    }

    /// What is told next, which must have this part.
    #[track_caller]
    pub fn hears(&mut self, part: &str) -> String {
        let line = self.next().unwrap_or_else(|| panic!("the end instead of {part}"));
        assert!(line.contains(part), "{line} instead of {part}");
        line
    }

    /// What is told until something has this part, that included.
    #[track_caller]
    pub fn until(&mut self, part: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let line = self.next().unwrap_or_else(|| panic!("the end instead of {part}: {lines:?}"));
            let found = line.contains(part);
            lines.push(line);
            if found {
                return lines;
            }
        }
    }

    /// Nothing more is told.
    #[track_caller]
    pub fn ends(mut self) {
        let line = self.next();
        assert!(line.is_none(), "{line:?} instead of the end");
    }
}
