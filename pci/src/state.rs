//! How the state of functions is written down and read back: numbers in little endian, in sections that have a name and a length.
//!
//! Who writes leaves nothing out, who reads expects exactly that. What is read comes from a file and may be anything: each value
//! is checked by who takes it, and a section that is shorter or longer than it should be is an error.

use thiserror::Error;

use crate::topology::Name;

/// Longest name of a section, bytes.
const LONGEST_NAME: usize = 255;

/// Collects state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Eight bits.
    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    /// Yes or no.
    pub fn bool(&mut self, value: bool) {
        self.u8(value.into());
    }

    /// 16 bits.
    pub fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    /// 32 bits.
    pub fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    /// 64 bits.
    pub fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// A number of things that follow.
    pub fn count(&mut self, count: usize) {
        self.u32(u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// Bytes and how many they are.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.0.extend(bytes);
    }

    /// A section called `name`, which is cut at 255 bytes.
    pub fn section<E>(&mut self, name: &str, write: impl FnOnce(&mut Self) -> Result<(), E>) -> Result<(), E> {
        let mut inside = Self::new();
        write(&mut inside)?;
        let name = name.as_bytes();
        self.bytes(name.get(..LONGEST_NAME).unwrap_or(name));
        self.bytes(&inside.0);
        Ok(())
    }

    /// All that was written.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// Reads state.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    rest: &'a [u8],
    section: String,
}

impl<'a> Reader<'a> {
    /// Reads `bytes`, which are called `section` in errors.
    #[must_use]
    pub fn new(bytes: &'a [u8], section: &str) -> Self {
        Self { rest: bytes, section: section.to_owned() }
    }

    /// Eight bits.
    pub fn u8(&mut self) -> Result<u8, StateError> {
        self.take().map(u8::from_le_bytes)
    }

    /// Yes or no.
    pub fn bool(&mut self) -> Result<bool, StateError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(self.wrong("a yes or no", value)),
        }
    }

    /// 16 bits.
    pub fn u16(&mut self) -> Result<u16, StateError> {
        self.take().map(u16::from_le_bytes)
    }

    /// 32 bits.
    pub fn u32(&mut self) -> Result<u32, StateError> {
        self.take().map(u32::from_le_bytes)
    }

    /// 64 bits.
    pub fn u64(&mut self) -> Result<u64, StateError> {
        self.take().map(u64::from_le_bytes)
    }

    /// A number of things that follow, each of at least one byte.
    pub fn count(&mut self) -> Result<usize, StateError> {
        let count = self.u32()?;
        let possible = usize::try_from(count).ok().filter(|count| *count <= self.rest.len());
        possible.ok_or_else(|| StateError::Short { section: self.section.clone() })
    }

    /// A number of things that must be as many as there are here.
    pub fn same_count(&mut self, what: &'static str, here: usize) -> Result<(), StateError> {
        let saved = self.u32()?;
        self.compare(what, saved.into(), here as u64)
    }

    /// A size that must be as it is here, 64 bits.
    pub fn same(&mut self, what: &'static str, here: u64) -> Result<(), StateError> {
        let saved = self.u64()?;
        self.compare(what, saved, here)
    }

    fn compare(&self, what: &'static str, saved: u64, here: u64) -> Result<(), StateError> {
        if saved == here {
            return Ok(());
        }
        Err(StateError::Other { section: self.section.clone(), what, saved, here })
    }

    /// Bytes with their number.
    pub fn bytes(&mut self) -> Result<&'a [u8], StateError> {
        let count = self.count()?;
        let (bytes, rest) =
            self.rest.split_at_checked(count).ok_or_else(|| StateError::Short { section: self.section.clone() })?;
        self.rest = rest;
        Ok(bytes)
    }

    /// A section, whatever its name.
    pub fn any_section(&mut self) -> Result<(String, Self), StateError> {
        let name = String::from_utf8_lossy(self.bytes()?).into_owned();
        let name: String = name.chars().take(LONGEST_NAME).flat_map(char::escape_default).collect();
        let inside = Self { rest: self.bytes()?, section: format!("{}/{name}", self.section) };
        Ok((name, inside))
    }

    /// The section `name`, which is next. `read` must read all of it.
    pub fn section<T>(&mut self, name: &str, read: impl FnOnce(&mut Self) -> Result<T, StateError>) -> Result<T, StateError> {
        let (found, mut inside) = self.any_section()?;
        if found != name {
            return Err(StateError::Section { section: self.section.clone(), wanted: name.to_owned(), found });
        }
        let value = read(&mut inside)?;
        inside.end()?;
        Ok(value)
    }

    /// Whether nothing is left.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Nothing must be left.
    pub fn end(self) -> Result<(), StateError> {
        if self.rest.is_empty() { Ok(()) } else { Err(StateError::Rest { section: self.section, bytes: self.rest.len() }) }
    }

    /// `value` is none that `what` can have.
    pub fn wrong(&self, what: &'static str, value: impl Into<u64>) -> StateError {
        StateError::Value { section: self.section.clone(), what, value: value.into() }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], StateError> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or_else(|| StateError::Short { section: self.section.clone() })?;
        self.rest = rest;
        Ok(*bytes)
    }
}

/// State that cannot be saved, or that is not what this machine saved.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum StateError {
    /// Ends too early.
    #[error("the state ends inside of {section}")]
    Short {
        /// Where.
        section: String,
    },
    /// Goes on too long.
    #[error("{section} has {bytes} bytes more than belong there")]
    Rest {
        /// Where.
        section: String,
        /// How many.
        bytes: usize,
    },
    /// Another section.
    #[error("{section} has the section `{found}` where `{wanted}` belongs")]
    Section {
        /// Where.
        section: String,
        /// Expected.
        wanted: String,
        /// Found.
        found: String,
    },
    /// An impossible value.
    #[error("{value:#x} in {section} is not {what}")]
    Value {
        /// Where.
        section: String,
        /// What it should be.
        what: &'static str,
        /// The value.
        value: u64,
    },
    /// Of another machine.
    #[error("{section} has {saved} {what}, but the machine has {here}: it is not the one that was saved")]
    Other {
        /// Where.
        section: String,
        /// What is counted.
        what: &'static str,
        /// As saved.
        saved: u64,
        /// In this machine.
        here: u64,
    },
    /// Something that has its state elsewhere.
    #[error("its state cannot be kept: {why}")]
    NotKept {
        /// Why.
        why: &'static str,
    },
    /// A function that is not there.
    #[error("there is no {name} in this machine: it is not the one that was saved")]
    Unknown {
        /// Its name.
        name: String,
    },
    /// One device or port.
    #[error("{name}")]
    Device {
        /// Its name.
        name: Name,
        /// What is wrong.
        #[source]
        source: Box<StateError>,
    },
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_written_is_read_and_nothing_else() {
        let mut writer = Writer::new();
        writer.u8(7);
        let inside: Result<(), StateError> = writer.section("one", |writer| {
            writer.bool(true);
            writer.u16(0x1234);
            writer.bytes(b"abc");
            writer.section("two", |writer| {
                writer.u64(u64::MAX);
                Ok(())
            })
        });
        inside.unwrap();
        writer.u32(9);
        let bytes = writer.into_bytes();
        let read = |bytes: &[u8]| {
            let mut reader = Reader::new(bytes, "state");
            let first = reader.u8()?;
            let rest = reader.section("one", |reader| {
                let flags = (reader.bool()?, reader.u16()?, reader.bytes()?.to_vec());
                Ok((flags, reader.section("two", |reader| reader.u64())?))
            })?;
            let last = reader.u32()?;
            reader.end()?;
            Ok((first, rest, last))
        };
        let expected = (7, ((true, 0x1234, b"abc".to_vec()), u64::MAX), 9);
        assert_eq!(read(&bytes), Ok(expected));
        for len in 0..bytes.len() {
            assert!(matches!(read(&bytes[..len]), Err(StateError::Short { .. })), "{len}");
        }
        assert!(matches!(read(&[bytes, vec![0]].concat()), Err(StateError::Rest { bytes: 1, .. })));
    }

    #[test]
    fn errors_name_the_place() {
        let mut writer = Writer::new();
        writer
            .section("a", |writer| {
                writer.section::<StateError>("b", |writer| {
                    writer.u8(2);
                    Ok(())
                })
            })
            .unwrap();
        let bytes = writer.into_bytes();
        let mut reader = Reader::new(&bytes, "state");
        let error = reader.clone().section("a", |reader| reader.section("b", |reader| reader.bool())).unwrap_err();
        assert_eq!(error.to_string(), "0x2 in state/a/b is not a yes or no");
        let error = reader.section("c", |_| Ok(())).unwrap_err();
        assert_eq!(error.to_string(), "state has the section `a` where `c` belongs");
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let mut reader = Reader::new(&bytes, "state");
            while let Ok((_, mut inside)) = reader.any_section() {
                let _ = (inside.bool(), inside.count(), inside.bytes(), inside.same_count("things", 3), inside.u64());
            }
        }
    }
}
