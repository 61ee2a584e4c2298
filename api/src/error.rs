//! What a client is told when its request cannot be met: a kind, which becomes the status, and the chain of causes.

use std::error::Error;
use std::fmt;
use std::io;

use rustix::io::Errno;

/// Why a request was not met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// Whose fault it is.
    pub kind: ErrorKind,
    /// What happened, outermost cause first; never empty. Each names what, which one and the limit.
    pub chain: Vec<String>,
}

/// Kinds of failure, as a client can tell them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request asks for what cannot be.
    BadRequest,
    /// No machine, or no device of that name.
    NotFound,
    /// Not in this state of the machine.
    WrongState,
    /// The name or the resource is taken.
    Conflict,
    /// The API has the request, this machine cannot do it.
    Unsupported,
    /// The host or Banyan failed.
    Internal,
}

impl ErrorKind {
    /// HTTP status code.
    #[must_use]
    pub const fn status(self) -> u16 {
        match self {
            Self::BadRequest | Self::Unsupported => 400,
            Self::NotFound => 404,
            Self::WrongState => 405,
            Self::Conflict => 409,
            Self::Internal => 500,
        }
    }
}

impl ApiError {
    /// An error with one cause.
    #[must_use]
    pub fn new(kind: ErrorKind, what: impl Into<String>) -> Self {
        Self { kind, chain: vec![what.into()] }
    }

    /// An error and all that caused it. A cause that says what its effect said already is left out.
    /// What the host has not left for anybody is the host's failure, whatever it was for.
    #[must_use]
    pub fn from_error(kind: ErrorKind, error: &dyn Error) -> Self {
        let mut chain = vec![error.to_string()];
        let (mut kind, mut cause) = (kind, error.source());
        while let Some(error) = cause {
            let text = error.to_string();
            if chain.last() != Some(&text) {
                chain.push(text);
            }
            if error.downcast_ref::<io::Error>().is_some_and(is_exhaustion) {
                kind = ErrorKind::Internal;
            }
            cause = error.source();
        }
        Self { kind, chain }
    }

    /// The same, as the cause of `what`.
    #[must_use]
    pub fn within(mut self, what: impl Into<String>) -> Self {
        self.chain.insert(0, what.into());
        self
    }

    /// No machine is there: none was created, or the last one was deleted.
    #[must_use]
    pub fn no_vm() -> Self {
        Self::new(ErrorKind::NotFound, "there is no virtual machine; call vm.create first")
    }

    /// Not in the state that the machine is in.
    #[must_use]
    pub fn wrong_state(what: &str, phase: &dyn fmt::Display) -> Self {
        Self::new(ErrorKind::WrongState, format!("{what} is not possible while the virtual machine is {phase}"))
    }

    /// The API has it, this machine does not.
    #[must_use]
    pub fn unsupported(what: &str) -> Self {
        Self::new(ErrorKind::Unsupported, format!("{what} is not supported by this version of Banyan"))
    }
}

/// Whether this process or the host has no descriptors or memory left.
fn is_exhaustion(error: &io::Error) -> bool {
    let codes = [Errno::MFILE, Errno::NFILE, Errno::NOMEM].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

impl fmt::Display for ApiError {
    /// The chain on one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.chain.join(": "))
    }
}

impl Error for ApiError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("image /a cannot be opened")]
    struct Outer(#[source] Middle);

    #[derive(Debug, thiserror::Error)]
    #[error("busy")]
    struct Middle(#[source] Inner);

    #[derive(Debug, thiserror::Error)]
    #[error("busy")]
    struct Inner;

    #[test]
    fn what_the_host_has_not_left_is_not_the_clients_mistake() {
        #[derive(Debug, thiserror::Error)]
        #[error("the disk a cannot be opened")]
        struct Disk(#[source] io::Error);
        for (errno, kind) in [(Errno::MFILE, ErrorKind::Internal), (Errno::NOENT, ErrorKind::BadRequest)] {
            assert_eq!(ApiError::from_error(ErrorKind::BadRequest, &Disk(errno.into())).kind, kind);
        }
    }

    #[test]
    fn causes_follow_their_effect_and_are_said_once() {
        let error = ApiError::from_error(ErrorKind::Conflict, &Outer(Middle(Inner))).within("disk cannot be added");
        assert_eq!(error.chain, ["disk cannot be added", "image /a cannot be opened", "busy"]);
        assert_eq!(
            (error.kind.status(), error.to_string().as_str()),
            (409, "disk cannot be added: image /a cannot be opened: busy")
        );
    }
}
