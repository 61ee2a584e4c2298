//! Opens the files that a machine boots from.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, fstat, open};

/// Opens the regular file at `path` for reading and tells its size. Never waits, whatever is there.
pub fn open_regular(path: &Path) -> io::Result<(File, u64)> {
    // A pipe without a writer would hold up a plain open.
    let file = File::from(open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?);
    let stat = fstat(&file)?;
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => return Ok((file, u64::try_from(stat.st_size).unwrap_or(0))),
        FileType::Directory => "a folder",
        FileType::Fifo => "a pipe",
        FileType::BlockDevice | FileType::CharacterDevice => "a device",
        _ => "something else",
    };
    Err(io::Error::other(format!("it is {kind}, no regular file")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_regular_file_is_named_and_never_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::RUSR).unwrap();
        for (path, kind) in [(folder.path(), "a folder"), (&pipe, "a pipe"), (Path::new("/dev/null"), "a device")] {
            assert_eq!(open_regular(path).unwrap_err().to_string(), format!("it is {kind}, no regular file"));
        }
        assert_eq!(open_regular(&folder.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
        let file = folder.path().join("file");
        std::fs::write(&file, "five!").unwrap();
        assert_eq!(open_regular(&file).unwrap().1, 5);
    }
}
