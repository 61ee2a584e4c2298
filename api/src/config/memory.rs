//! How much memory, and what backs it.

use std::fmt;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use super::flags::{Flag, FlagError, Pairs, choice};
use super::size::Size;

/// `--memory`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Fields")]
pub struct MemoryConfig {
    /// Bytes of guest memory. The memory map says which sizes are possible.
    pub size: Size,
    /// Bytes that may come beside those of the start. Address space only, nothing is committed.
    pub growth: Size,
    /// How it comes. Without growth it says nothing.
    pub method: HotPlugMethod,
    /// Backed by a file descriptor that another process can map.
    pub shared: bool,
    /// RAM of the start is in this file: `shared`, what the guest writes is there; otherwise the guest begins with what is there,
    /// and the file stays as it is. What comes later is elsewhere.
    pub file: Option<PathBuf>,
    /// Backed by huge pages of the host's pool, of this size.
    pub hugepages: Option<HugePageSize>,
    /// Every page is touched before the guest starts.
    pub prefault: bool,
    /// Threads that touch them; by default one per processor of the guest, at most 16. Only with `prefault`.
    pub prefault_threads: Option<NonZeroU16>,
    /// Names for parts of it, if an API client gave it in such: they come to `size`. None with `file`.
    pub zones: Vec<MemoryZone>,
}

/// A part of memory that memory nodes are made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryZone {
    /// Its name.
    pub id: String,
    /// Bytes.
    pub size: Size,
    /// The host node that it comes from.
    pub host_node: Option<u32>,
}

/// Size of a huge page on x86-64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePageSize {
    /// 2 MiB.
    TwoMib,
    /// 1 GiB.
    OneGib,
}

impl HugePageSize {
    /// Bytes in a page.
    #[must_use]
    pub const fn size(self) -> Size {
        Size(match self {
            Self::TwoMib => 2 << 20,
            Self::OneGib => 1 << 30,
        })
    }
}

impl Default for MemoryConfig {
    /// 512 MiB of private, ordinary pages.
    fn default() -> Self {
        Self {
            size: Size(512 << 20),
            growth: Size(0),
            method: HotPlugMethod::default(),
            shared: false,
            file: None,
            hugepages: None,
            prefault: false,
            prefault_threads: None,
            zones: Vec::new(),
        }
    }
}

choice!(
    /// `hotplug-method=`.
    #[derive(Default)]
    HotPlugMethod {
        /// Memory devices of ACPI: it comes and stays.
        #[default]
        Acpi = "acpi",
        /// Memory devices of virtio: it comes and goes in blocks.
        VirtioMem = "virtio-mem",
    }
);

choice!(
    /// `hugepages=`.
    HugePages { Off = "off" | "false", On = "on" | "true", TwoMib = "2M", OneGib = "1G" }
);

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Fields {
    #[serde(default = "usual")]
    size: Size,
    hotplug: Option<Size>,
    hotplug_method: Option<HotPlugMethod>,
    #[serde(default)]
    shared: bool,
    file: Option<PathBuf>,
    hugepages: Option<HugePages>,
    hugepage_size: Option<Size>,
    #[serde(default)]
    prefault: bool,
    prefault_threads: Option<u16>,
}

fn usual() -> Size {
    MemoryConfig::default().size
}

impl TryFrom<Fields> for MemoryConfig {
    type Error = MemoryError;

    fn try_from(fields: Fields) -> Result<Self, MemoryError> {
        let by_size = match fields.hugepage_size {
            None => None,
            Some(size) if size == HugePageSize::TwoMib.size() => Some(HugePageSize::TwoMib),
            Some(size) if size == HugePageSize::OneGib.size() => Some(HugePageSize::OneGib),
            Some(size) => return Err(MemoryError::HugePageSize { size }),
        };
        let hugepages = match (fields.hugepages, by_size) {
            (None | Some(HugePages::Off), None) => None,
            (None | Some(HugePages::Off), Some(_)) => return Err(MemoryError::SizeWithoutHugePages),
            (Some(HugePages::On), size) => Some(size.unwrap_or(HugePageSize::TwoMib)),
            (Some(HugePages::TwoMib), None | Some(HugePageSize::TwoMib)) => Some(HugePageSize::TwoMib),
            (Some(HugePages::OneGib), None | Some(HugePageSize::OneGib)) => Some(HugePageSize::OneGib),
            (Some(_), Some(_)) => return Err(MemoryError::TwoSizes),
        };
        let growth = fields.hotplug.unwrap_or(Size(0));
        if fields.hotplug_method.is_some() && growth == Size(0) {
            return Err(MemoryError::MethodWithoutGrowth);
        }
        if fields.size.bytes().checked_add(growth.bytes()).is_none() {
            return Err(MemoryError::GrowthTooLarge { growth });
        }
        if let Some(page) = hugepages.map(HugePageSize::size)
            && !fields.size.bytes().is_multiple_of(page.bytes())
        {
            return Err(MemoryError::NotWholePages { size: fields.size, page });
        }
        if hugepages.is_some() && fields.file.is_some() {
            return Err(MemoryError::FileWithHugePages);
        }
        if fields.file.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
            return Err(MemoryError::NoFile);
        }
        let prefault_threads = match (fields.prefault_threads.map(NonZeroU16::new), fields.prefault) {
            (None, _) => None,
            (Some(_), false) => return Err(MemoryError::ThreadsWithoutPrefault),
            (Some(None), true) => return Err(MemoryError::NoThreads),
            (Some(threads), true) => threads,
        };
        Ok(Self {
            size: fields.size,
            growth,
            method: fields.hotplug_method.unwrap_or_default(),
            shared: fields.shared,
            file: fields.file,
            hugepages,
            prefault: fields.prefault,
            prefault_threads,
            zones: Vec::new(),
        })
    }
}

impl MemoryConfig {
    /// Whether RAM of the start is in a file that has what the guest writes.
    #[must_use]
    pub const fn keeps(&self) -> bool {
        self.shared && self.file.is_some()
    }
}

impl FromStr for MemoryConfig {
    type Err = FlagError;

    fn from_str(text: &str) -> Result<Self, FlagError> {
        Flag { name: "--memory", first: "size" }.parse(text)
    }
}

impl fmt::Display for MemoryConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pairs = Pairs::new(f);
        pairs.pair("size", &self.size)?;
        if self.growth != Size(0) {
            pairs.pair("hotplug", &self.growth)?;
            if self.method != HotPlugMethod::default() {
                pairs.pair("hotplug-method", &self.method)?;
            }
        }
        pairs.switch("shared", self.shared, false)?;
        pairs.optional("file", self.file.as_ref().map(|path| path.display()).as_ref().map(|path| path as _))?;
        pairs.optional("hugepages", self.hugepages.map(HugePageSize::size).as_ref().map(|size| size as _))?;
        pairs.switch("prefault", self.prefault, false)?;
        pairs.optional("prefault-threads", self.prefault_threads.as_ref().map(|threads| threads as _))
    }
}

/// Keys of `--memory` that do not go together.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum MemoryError {
    /// A page size that x86-64 does not have.
    #[error("huge pages of {size} do not exist; use 2M or 1G")]
    HugePageSize {
        /// What was given.
        size: Size,
    },
    /// `hugepage-size` alone.
    #[error("`hugepage-size` has no effect without `hugepages=on`; add it, or write `hugepages=2M` alone")]
    SizeWithoutHugePages,
    /// `hugepages=2M,hugepage-size=1G`.
    #[error("`hugepages` and `hugepage-size` name different sizes; keep one of them")]
    TwoSizes,
    /// More than 64 bits can count.
    #[error("`hotplug` of {growth} is, with `size`, more than 64 bits can count; lower it")]
    GrowthTooLarge {
        /// What may come.
        growth: Size,
    },
    /// `hotplug-method` alone.
    #[error("`hotplug-method` has no effect without `hotplug`; add how much may come")]
    MethodWithoutGrowth,
    /// A last page that would be cut.
    #[error("a size of {size} is no multiple of the huge page size {page}; round it up")]
    NotWholePages {
        /// Memory.
        size: Size,
        /// Page.
        page: Size,
    },
    /// `file` with `hugepages`.
    #[error("memory in a file has the pages of the file; leave out `hugepages`, and name a file in a hugetlbfs for large ones")]
    FileWithHugePages,
    /// `file=`.
    #[error("`file` names no file; give a path, or leave it out")]
    NoFile,
    /// `prefault-threads` alone.
    #[error("`prefault-threads` has no effect without `prefault=on`; add it")]
    ThreadsWithoutPrefault,
    /// `prefault-threads=0`.
    #[error("`prefault-threads` is 0; give 1 or more, or leave it out")]
    NoThreads,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_size_is_enough() {
        assert_eq!("2G".parse(), Ok(MemoryConfig { size: Size(2 << 30), ..MemoryConfig::default() }));
    }

    #[test]
    fn without_a_size_memory_has_that_of_a_machine_without_the_flag() {
        assert_eq!("shared=on".parse(), Ok(MemoryConfig { shared: true, ..MemoryConfig::default() }));
        let error = "hugepages=1G".parse::<MemoryConfig>().unwrap_err().to_string();
        assert!(error.contains("512M is no multiple"), "{error}");
    }

    #[test]
    fn huge_pages_are_named_by_size_or_switched_on() {
        for (text, pages) in [
            ("1G,hugepages=off", None),
            ("1G,hugepages=on", Some(HugePageSize::TwoMib)),
            ("1G,hugepages=2M", Some(HugePageSize::TwoMib)),
            ("1G,hugepages=on,hugepage_size=1G", Some(HugePageSize::OneGib)),
            ("1G,hugepages=1G,hugepage-size=1G", Some(HugePageSize::OneGib)),
        ] {
            assert_eq!(text.parse::<MemoryConfig>().unwrap().hugepages, pages, "{text}");
        }
    }

    #[test]
    fn keys_that_contradict_each_other_are_refused() {
        for (text, part) in [
            ("1G,hugepage_size=2M", "without `hugepages=on`"),
            ("1G,hugepages=2M,hugepage_size=1G", "different sizes"),
            ("1G,hugepages=on,hugepage_size=4K", "huge pages of 4K do not exist"),
            ("1025M,hugepages=1G", "1025M is no multiple of the huge page size 1G"),
            ("1G,hugepages=2M,file=/f", "leave out `hugepages`"),
            ("1G,file=\"\"", "names no file"),
            ("1G,prefault_threads=4", "without `prefault=on`"),
            ("1G,prefault=on,prefault_threads=0", "is 0"),
            ("1G,hugepages=4M", "key `hugepages`"),
            ("2T,hotplug=16777215T", "more than 64 bits"),
            ("2T,hotplug-method=virtio-mem", "no effect without `hotplug`"),
            ("2T,hotplug=2T,hotplug_method=pmem", "key `hotplug-method`"),
        ] {
            let error = text.parse::<MemoryConfig>().unwrap_err().to_string();
            assert!(error.starts_with("--memory: ") && error.contains(part), "{error}");
        }
    }

    #[test]
    fn what_is_printed_reads_back() {
        for text in [
            "2G",
            "512M,shared=on,hugepages=2M,prefault=on,prefault-threads=4",
            "1T,hugepages=1G",
            "1G,shared=on,file=\"/a,b\"",
            "512M,hotplug=24T",
            "1G,hotplug=2G,hotplug-method=virtio-mem",
        ] {
            let config: MemoryConfig = text.parse().unwrap();
            assert_eq!(config.to_string().parse(), Ok(config));
        }
    }
}
