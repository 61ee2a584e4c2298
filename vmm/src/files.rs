//! Decides what is read when somebody names a file, be it an attribute of a made-up sysfs: regular files up to a limit.
//! Opening never waits, whatever stands there.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Largest attribute of sysfs that is read, in bytes. The kernel gives a page, or a little more for lists.
pub const ATTRIBUTE: u64 = 64 << 10;

/// The content of a regular file of at most `limit` bytes. What [`is_refused`] tells apart is an error: a directory, device or
/// FIFO, and a file that is larger.
pub fn bytes(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    // Without O_NONBLOCK a FIFO would make the opening wait for a writer; O_NOCTTY keeps a terminal from becoming ours.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no regular file"));
    }
    let mut content = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut content)?;
    if content.len() as u64 > limit {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {}", size(limit))));
    }
    Ok(content)
}

/// The same for text.
pub fn text(path: &Path, limit: u64) -> io::Result<String> {
    let content = bytes(path, limit)?;
    String::from_utf8(content).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is no UTF-8 text"))
}

/// Whether a file is there and is not what may be read, as opposed to one that is absent or that the kernel denies.
#[must_use]
pub fn is_refused(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::FileTooLarge)
}

fn size(limit: u64) -> String {
    match limit {
        0..0x400 => format!("{limit} bytes"),
        0x400..0x10_0000 => format!("{} KiB", limit >> 10),
        _ => format!("{} MiB", limit >> 20),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_regular_files_within_the_limit_are_read_and_nothing_waits() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("file"), "12345678").unwrap();
        std::os::unix::fs::symlink("/dev/zero", path("zero")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        fs::write(path("binary"), [0xFF, 0xFE]).unwrap();
        assert_eq!(text(&path("file"), 8).unwrap(), "12345678");
        assert_eq!(bytes(&path("binary"), 8).unwrap(), [0xFF, 0xFE]);
        for (name, limit, why) in [
            ("file", 7, "it has more than 7 bytes"),
            ("zero", 8, "it is no regular file"),
            ("fifo", 8, "it is no regular file"),
            (".", 8, "it is no regular file"),
            ("binary", 8, "it is no UTF-8 text"),
        ] {
            let error = text(&path(name), limit).unwrap_err();
            assert_eq!((error.to_string(), is_refused(&error)), (why.to_owned(), true), "{name}");
        }
        assert!(!is_refused(&text(&path("absent"), 8).unwrap_err()));
        assert_eq!([4096, 16 << 20].map(size), ["4 KiB", "16 MiB"]);
    }
}
