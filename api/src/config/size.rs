//! Reads and prints a number of bytes: `512M`, `0x1000`, `2T`.

use std::fmt;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Error as _, Visitor};
use thiserror::Error;

/// Bytes. Written as a number with an optional suffix K, M, G or T (powers of 1024, either case); `0x` starts a hexadecimal
/// number. Printed in the largest unit that divides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Size(pub u64);

const UNITS: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

impl Size {
    /// Number of bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let no_number = || SizeError::NoNumber { text: text.to_owned() };
        let unit = text.chars().last().and_then(|last| UNITS.iter().find(|(unit, _)| *unit == last.to_ascii_uppercase()));
        let (number, shift) = match unit {
            Some((_, shift)) => (text.get(..text.len() - 1).unwrap_or_default(), *shift),
            None => (text, 0),
        };
        let (digits, radix) = match number.strip_prefix("0x") {
            Some(digits) => (digits, 16),
            None => (number, 10),
        };
        if digits.is_empty() || !digits.chars().all(|digit| digit.is_digit(radix)) {
            return Err(no_number());
        }
        // All digits, so only the range can be wrong.
        let number = u64::from_str_radix(digits, radix).map_err(|_| SizeError::TooLarge { text: text.to_owned() })?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(|| SizeError::TooLarge { text: text.to_owned() })
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, shift)| self.0 != 0 && self.0.trailing_zeros() >= *shift) {
            Some((unit, shift)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrNumber;
        impl Visitor<'_> for TextOrNumber {
            type Value = Size;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as 512M, or a number of bytes")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Size, E> {
                text.parse().map_err(E::custom)
            }
            fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<Size, E> {
                Ok(Size(bytes))
            }
            fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<Size, E> {
                u64::try_from(bytes).map(Size).map_err(|_| E::custom(format!("`{bytes}` is negative; a size is 0 or more")))
            }
        }
        deserializer.deserialize_any(TextOrNumber).map_err(D::Error::custom)
    }
}

/// A text that is no size.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SizeError {
    /// Not a number with a known suffix.
    #[error("`{text}` is no size: write a number of bytes with an optional suffix K, M, G or T, such as 512M or 0x1000")]
    NoNumber {
        /// What was given.
        text: String,
    },
    /// More than 64 bits.
    #[error("`{text}` is too large: a size is below 16777216T (2^64 bytes)")]
    TooLarge {
        /// What was given.
        text: String,
    },
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn suffixes_are_powers_of_1024_in_either_case() {
        for (text, bytes) in [("0", 0), ("1", 1), ("4k", 4096), ("512M", 512 << 20), ("3g", 3 << 30), ("2T", 2 << 40)] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        assert_eq!("0x10K".parse(), Ok(Size(0x4000)));
    }

    #[test]
    fn a_size_prints_in_the_largest_unit_that_divides_it() {
        for (bytes, shown) in [(0, "0"), (1000, "1000"), (1536, "1536"), (1 << 20, "1M"), (128 << 30, "128G")] {
            assert_eq!(Size(bytes).to_string(), shown);
        }
    }

    #[test]
    fn a_size_beyond_64_bits_is_refused_not_wrapped() {
        for text in ["16777216T", "18446744073709551616", "0x10000000000000000", "99999999999999999999T"] {
            assert!(matches!(text.parse::<Size>(), Err(SizeError::TooLarge { .. })), "{text}");
        }
        assert_eq!("18446744073709551615".parse(), Ok(Size(u64::MAX)));
    }

    #[test]
    fn what_is_no_number_is_refused() {
        for text in ["", "K", "1.5G", "-1", "+1", "1 G", "1GiB", "0x", "é", "1é", "12P"] {
            assert!(matches!(text.parse::<Size>(), Err(SizeError::NoNumber { .. })), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_reads_back(bytes: u64) {
            prop_assert_eq!(Size(bytes).to_string().parse(), Ok(Size(bytes)));
        }

        #[test]
        fn any_text_gives_an_answer(text in ".*") {
            let _ = text.parse::<Size>();
        }
    }
}
