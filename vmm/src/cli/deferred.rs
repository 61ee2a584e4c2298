//! Defines a command's arguments when the command is used, not each time the program starts: most of what a short run spends
//! on its command line would otherwise go into commands that it does not use.

use clap::builder::{Resettable, StyledStr};
use clap::{ArgMatches, Args, Command, Error, FromArgMatches};

/// Arguments of one command.
#[derive(Debug)]
pub struct Deferred<T>(pub Box<T>);

impl<T: Args> Args for Deferred<T> {
    fn augment_args(command: Command) -> Command {
        command.defer(define::<T>)
    }

    fn augment_args_for_update(command: Command) -> Command {
        T::augment_args_for_update(command)
    }
}

impl<T: FromArgMatches> FromArgMatches for Deferred<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        T::from_arg_matches(matches).map(|arguments| Self(Box::new(arguments)))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.0.update_from_arg_matches(matches)
    }
}

/// The command keeps its own description where that of its arguments would take its place.
fn define<T: Args>(command: Command) -> Command {
    let kept = |about: Option<&StyledStr>| Resettable::from(about.cloned());
    let (short, long) = (kept(command.get_about()), kept(command.get_long_about()));
    T::augment_args(command).about(short).long_about(long)
}
