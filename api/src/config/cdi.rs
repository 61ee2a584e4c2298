//! Decides whether a text is the name of a device in the Container Device Interface: `vendor.com/class=name`.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

/// What it costs that a directory or a file is not as it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CdiMistakes {
    /// The machine: somebody named the directories for it, or looks at what is said. Directories that are named must exist, and a
    /// file that cannot be understood keeps the devices that it names from starting.
    #[default]
    Refuse,
    /// A warning: the files are for all machines of a host. A device that is asked for by its name in them has to be found all
    /// the same.
    Warn,
}

/// A qualified device name (CDI specification, "CDI JSON Specification").
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct CdiName {
    kind: String,
    name: String,
}

impl CdiName {
    /// Of a kind and a name that come apart, as in a CDI file.
    pub fn new(kind: &str, name: &str) -> Result<Self, CdiNameError> {
        format!("{kind}={name}").parse()
    }

    /// Vendor and class: `vendor.com/class`.
    #[must_use]
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The device's own name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl FromStr for CdiName {
    type Err = CdiNameError;

    fn from_str(text: &str) -> Result<Self, CdiNameError> {
        let parts = text.split_once('=').and_then(|(kind, name)| Some((kind, kind.split_once('/')?, name)));
        match parts {
            Some((kind, (vendor, class), name)) if is_word(vendor, "_-.") && is_word(class, "_-.") && is_name(name) => {
                Ok(Self { kind: kind.to_owned(), name: name.to_owned() })
            }
            _ => Err(CdiNameError { text: text.to_owned() }),
        }
    }
}

impl TryFrom<String> for CdiName {
    type Error = CdiNameError;

    fn try_from(text: String) -> Result<Self, CdiNameError> {
        text.parse()
    }
}

impl fmt::Display for CdiName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.kind, self.name)
    }
}

/// Whether the text of a `--device` begins with a CDI name and not with a key: keys and addresses hold no slash.
pub(super) fn starts_with_name(text: &str) -> bool {
    let before = text.split_once('=').map_or("", |(before, _)| before);
    before.contains('/') && !before.contains(',') && before.starts_with(|first: char| first.is_ascii_alphabetic())
}

/// Vendors and classes: a letter first, a letter or digit last.
fn is_word(text: &str, also: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphabetic()) && is_made_of(text, also)
}

/// Device names: a letter or digit first (digits since version 0.5) and last.
fn is_name(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphanumeric()) && is_made_of(text, "_-.:")
}

fn is_made_of(text: &str, also: &str) -> bool {
    text.ends_with(|last: char| last.is_ascii_alphanumeric())
        && text.chars().all(|char| char.is_ascii_alphanumeric() || also.contains(char))
}

/// A text that is no such name.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
#[error("`{text}` is no CDI name; give `vendor.com/class=name` of letters, digits and `_-.`, in the name also `:`")]
pub struct CdiNameError {
    /// What was given.
    text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_a_vendor_a_class_and_a_device() {
        for text in ["nvidia.com/gpu=gpu0", "nvidia.com/gpu=0", "a/b=c", "nvidia.com/mig-1g.5gb=0:1"] {
            assert_eq!(text.parse::<CdiName>().map(|name| name.to_string()), Ok(text.to_owned()));
        }
    }

    #[test]
    fn other_texts_are_no_names() {
        for text in
            ["", "=", "/=", "a/b", "a=b", "a/b=", "/b=c", "a/=c", "a/b/c=d", "a/b=c=d", "1a/b=c", "a-/b=c", "a/b=-c", "a/b=c d"]
        {
            assert!(text.parse::<CdiName>().is_err(), "{text}");
        }
    }
}
