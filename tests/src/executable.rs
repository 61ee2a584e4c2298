//! Finds the executable to test.

use std::env;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The file named by `BANYAN_BIN`; without it the newest `banyan` in cargo's target folder. Panics where there is none.
#[must_use]
pub fn path() -> PathBuf {
    if let Some(named) = env::var_os("BANYAN_BIN") {
        let path = PathBuf::from(named);
        assert!(path.is_file(), "BANYAN_BIN names {}, which is no file", path.display());
        return path;
    }
    let target = target_folder();
    ["debug/banyan", "release/banyan"]
        .into_iter()
        .map(|name| target.join(name))
        .filter_map(|path| Some((built_at(&path)?, path)))
        .max()
        .map(|(_, path)| path)
        .unwrap_or_else(|| {
            panic!("no executable in {}: run `cargo build` first, or set BANYAN_BIN to the file to test", target.display())
        })
}

/// Tests are at `target/PROFILE/deps/NAME`.
fn target_folder() -> PathBuf {
    let test = env::current_exe().unwrap_or_else(|error| panic!("the test's own path is unknown: {error}"));
    test.ancestors().nth(3).map(Path::to_owned).unwrap_or_default()
}

fn built_at(path: &Path) -> Option<SystemTime> {
    path.metadata().ok()?.modified().ok()
}
