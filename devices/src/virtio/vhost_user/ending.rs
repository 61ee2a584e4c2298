//! Decides what is told of a conversation with a server that ended. Whoever ends it says why; a server that ends it says nothing.

use std::sync::Mutex;

use pci::sync::lock;

/// The end of one conversation, which is told once.
#[derive(Debug, Default)]
pub(super) struct Ending(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// What the server was asked to do and has not done.
    under_way: Option<&'static str>,
    /// Why it was ended here.
    why: Option<String>,
    told: bool,
}

impl Ending {
    /// The server is asked for something: `what`, as in "while it was told of memory".
    pub(super) fn begin(&self, what: &'static str) {
        lock(&self.0).under_way = Some(what);
    }

    /// It has done what it was asked for.
    pub(super) fn done(&self) {
        lock(&self.0).under_way = None;
    }

    /// It is ended here, since `why`. The first word counts.
    pub(super) fn since(&self, why: String) {
        lock(&self.0).why.get_or_insert(why);
    }

    /// What is to be told of the end of a conversation with `server`, unless it was told.
    pub(super) fn take(&self, server: &str) -> Option<String> {
        /// What helps.
        const AGAIN: &str = "the device gives up until a server is there when a driver starts it";
        let mut state = lock(&self.0);
        if std::mem::replace(&mut state.told, true) {
            return None;
        }
        let meanwhile = state.under_way.map_or_else(String::new, |what| format!(" while it was {what}"));
        Some(match &state.why {
            None => format!("the server at {server} is gone{meanwhile}; {AGAIN}"),
            Some(why) => format!("{AGAIN}, since the one that it had failed{meanwhile}: {why}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_told_once_with_the_first_reason_and_what_the_server_was_doing() {
        let ending = Ending::default();
        ending.begin("told of memory");
        ending.done();
        assert!(ending.take("/s").unwrap().starts_with("the server at /s is gone; the device gives up"));
        assert_eq!(ending.take("/s"), None);
        let ending = Ending::default();
        ending.begin("told of memory");
        assert!(ending.take("/s").unwrap().starts_with("the server at /s is gone while it was told of memory; "));
        let ending = Ending::default();
        ending.begin("handed its rings");
        ending.since("it did not answer".to_owned());
        ending.since("it hung up".to_owned());
        assert!(ending.take("/s").unwrap().ends_with("failed while it was handed its rings: it did not answer"));
    }
}
