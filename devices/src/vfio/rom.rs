//! The expansion ROM of a host function: read from the device once, when a guest first looks at it. The kernel maps the ROM anew
//! for each read, and guests read it dword by dword.

use std::io;

use pci::bar::ROM;

use super::host::HostDevice;

/// Bytes that are read at once.
const CHUNK: usize = 64 << 10;

/// What the device holds, once it has been read.
#[derive(Debug, Default)]
pub struct Rom(Option<Vec<u8>>);

impl Rom {
    /// Reads `data.len()` bytes at `offset`; all ones where there is nothing. An error is told once: what could not be read is
    /// all ones from then on.
    pub fn read(&mut self, device: &mut impl HostDevice, offset: u64, data: &mut [u8]) -> io::Result<()> {
        data.fill(0xFF);
        let mut result = Ok(());
        let content = self.0.get_or_insert_with(|| {
            let mut content = vec![0xFF; usize::try_from(device.size(ROM.into())).unwrap_or(0)];
            result = load(device, &mut content);
            content
        });
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        if let Some(bytes) = start.checked_add(data.len()).and_then(|end| content.get(start..end)) {
            data.copy_from_slice(bytes);
        }
        result
    }
}

fn load(device: &mut impl HostDevice, content: &mut [u8]) -> io::Result<()> {
    let mut at = 0;
    for chunk in content.chunks_mut(CHUNK) {
        let read = device.read(ROM.into(), at, chunk);
        if read.is_err() {
            chunk.fill(0xFF);
            return read;
        }
        at += u64::try_from(chunk.len()).unwrap_or(0);
    }
    Ok(())
}
