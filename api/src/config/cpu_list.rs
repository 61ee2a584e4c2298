//! Reads and prints sets of processors as Linux writes them: `0-3,8`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// The highest number that a processor can have; a list of all of them stays small.
const LAST: u32 = 65_535;

/// A set of processors.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CpuList(BTreeSet<u32>);

impl CpuList {
    /// In ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether `cpu` is one of them.
    #[must_use]
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }
}

impl FromIterator<u32> for CpuList {
    fn from_iter<T: IntoIterator<Item = u32>>(numbers: T) -> Self {
        Self(numbers.into_iter().collect())
    }
}

impl FromStr for CpuList {
    type Err = CpuListError;

    /// Reads `0-3,8`; nothing stands for no processor.
    fn from_str(text: &str) -> Result<Self, CpuListError> {
        let bad = || CpuListError { text: text.chars().take(64).collect() };
        let number = |text: &str| match text.trim().parse() {
            Ok(number @ 0..=LAST) => Ok(number),
            _ => Err(bad()),
        };
        let mut list = BTreeSet::new();
        for item in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
            let (first, last) = item.split_once('-').unwrap_or((item, item));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(bad());
            }
            list.extend(first..=last);
        }
        Ok(Self(list))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for number in self.iter() {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == number => *last = number,
                _ => runs.push((number, number)),
            }
        }
        for (index, (first, last)) in runs.into_iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            if first == last { write!(f, "{comma}{first}") } else { write!(f, "{comma}{first}-{last}") }?;
        }
        Ok(())
    }
}

/// Not a list of processors.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
#[error("`{text}` is no list of processors; write it as 0-3,8 with numbers up to {LAST}")]
pub struct CpuListError {
    text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_printed_as_linux_does() {
        for (text, printed) in [("0", "0"), ("0-3,8\n", "0-3,8"), ("8,0,1,2,3", "0-3,8"), ("", ""), ("\n", ""), ("5-5", "5")] {
            assert_eq!(text.parse::<CpuList>().unwrap().to_string(), printed);
        }
    }

    #[test]
    fn what_is_no_list_is_refused_whatever_its_size() {
        for text in ["x", "1-", "-1", "3-1", "0,,1", "0-65536", "0-18446744073709551616", ","] {
            let error = text.parse::<CpuList>().unwrap_err().to_string();
            assert!(error.contains("no list of processors"), "{error}");
        }
    }
}
