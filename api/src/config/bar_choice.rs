//! Which BARs of a device something is for: all, none, or some by number.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

/// `direct=` and `p2p=`: `on`, `off`, or numbers such as `0+2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct BarChoice(u8);

/// Highest number of a BAR.
const HIGHEST: u8 = 5;

impl BarChoice {
    /// Every BAR, and what else a device has of the kind.
    pub const ALL: Self = Self(u8::MAX);
    /// No BAR.
    pub const NONE: Self = Self(0);

    /// Every BAR but these.
    pub fn without(bars: &[u8]) -> Result<Self, BarChoiceError> {
        match bars.iter().find(|bar| **bar > HIGHEST) {
            Some(bar) => Err(BarChoiceError { text: bar.to_string() }),
            None if bars.is_empty() => Ok(Self::ALL),
            None => Ok(Self((0..=HIGHEST).filter(|bar| !bars.contains(bar)).fold(0, |bits, bar| bits | 1 << bar))),
        }
    }

    /// Whether BAR `bar` is among them.
    #[must_use]
    pub const fn has(self, bar: u8) -> bool {
        bar < 8 && self.0 >> bar & 1 != 0
    }
}

impl Default for BarChoice {
    fn default() -> Self {
        Self::ALL
    }
}

impl FromStr for BarChoice {
    type Err = BarChoiceError;

    fn from_str(text: &str) -> Result<Self, BarChoiceError> {
        match text {
            "on" | "true" => return Ok(Self::ALL),
            "off" | "false" => return Ok(Self::NONE),
            _ => {}
        }
        text.split('+').try_fold(Self::NONE, |Self(bits), number| match number.parse::<u8>() {
            Ok(bar @ 0..=HIGHEST) => Ok(Self(bits | 1 << bar)),
            _ => Err(BarChoiceError { text: text.chars().take(64).collect() }),
        })
    }
}

impl TryFrom<String> for BarChoice {
    type Error = BarChoiceError;

    fn try_from(text: String) -> Result<Self, BarChoiceError> {
        text.parse()
    }
}

impl fmt::Display for BarChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::ALL => f.write_str("on"),
            Self::NONE => f.write_str("off"),
            some => {
                let numbers: Vec<String> = (0..=HIGHEST).filter(|bar| some.has(*bar)).map(|bar| bar.to_string()).collect();
                f.write_str(&numbers.join("+"))
            }
        }
    }
}

/// No choice of BARs.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
#[error("`{text}` names no BARs; write `on`, `off`, or numbers from 0 to {HIGHEST} such as `0+2`")]
pub struct BarChoiceError {
    text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_all_none_or_numbers() {
        for (text, bars) in [("on", &[0, 1, 2, 3, 4, 5, 6][..]), ("off", &[]), ("0+2", &[0, 2]), ("5", &[5])] {
            let choice: BarChoice = text.parse().unwrap();
            assert_eq!((0..=6).filter(|bar| choice.has(*bar)).collect::<Vec<_>>(), bars, "{text}");
            assert_eq!(choice.to_string(), text);
        }
        for (bars, text) in [(&[][..], "on"), (&[0, 2, 0], "1+3+4+5"), (&[0, 1, 2, 3, 4, 5], "off")] {
            let choice = BarChoice::without(bars).unwrap();
            assert_eq!((choice.to_string().as_str(), text.parse()), (text, Ok(choice)));
        }
        assert!(BarChoice::without(&[1, 6]).is_err());
        for text in ["", "6", "0+", "-1", "all", "0,1"] {
            assert!(text.parse::<BarChoice>().is_err(), "{text}");
        }
    }
}
