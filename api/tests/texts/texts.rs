//! Reads any bytes as everything that users and clients write. Nothing panics, and what a flag's text means is what the text
//! means that it is shown as.

use std::fmt::{Debug, Display};
use std::str::FromStr;

use api::config::{
    BalloonConfig, CpuConfig, CpuList, DeviceConfig, DiskConfig, FsConfig, LogConfig, MemoryConfig, NetConfig, NumaFlag,
    PcieConfig, Policy, RngConfig, TopologyConfig, VmConfig, VsockConfig,
};
use api::dialect::{self, Notes};

/// The first byte says what the others are.
pub fn read(bytes: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else { return };
    let text = String::from_utf8_lossy(rest);
    match kind % 20 {
        0..4 => flag::<DeviceConfig>(&text),
        4 => flag::<PcieConfig>(&text),
        5 => flag::<DiskConfig>(&text),
        6 => flag::<MemoryConfig>(&text),
        7 => flag::<NetConfig>(&text),
        8 => flag::<FsConfig>(&text),
        9 => flag::<VsockConfig>(&text),
        10 => flag::<NumaFlag>(&text),
        11 => flag::<CpuConfig>(&text),
        12 => flag::<RngConfig>(&text),
        13 => flag::<BalloonConfig>(&text),
        14 => flag::<CpuList>(&text),
        15 => flag::<LogConfig>(&text),
        16 => {
            let _ = TopologyConfig::parse("file", &text);
        }
        17 => {
            let _ = Policy::parse("file", &text);
        }
        18 => {
            let _ = dialect::create(rest, &VmConfig::default(), &Notes::default());
        }
        _ => body(rest),
    }
}

fn flag<T: FromStr + Display + PartialEq + Debug>(text: &str) {
    let Ok(value) = text.parse::<T>() else { return };
    let shown = value.to_string();
    let again = shown.parse::<T>().ok();
    assert_eq!(again.as_ref(), Some(&value), "`{text}` is shown as `{shown}`");
}

fn body(bytes: &[u8]) {
    let notes = Notes::default();
    let _ = dialect::add_device(bytes, &notes);
    let _ = dialect::add_disk(bytes, &notes);
    let _ = dialect::add_net(bytes, 2, &notes);
    let _ = dialect::add_fs(bytes, &notes);
    let _ = dialect::add_vsock(bytes, &notes);
    let _ = dialect::remove_device(bytes, &notes);
    let _ = dialect::inject_error(bytes, &notes);
    let _ = dialect::resize(bytes, &notes);
}
