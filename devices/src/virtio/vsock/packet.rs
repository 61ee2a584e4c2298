//! The header of every packet (virtio 1.2 5.10.6): 44 bytes in front of its data.
//!
//! Parsed here and not by the crate virtio-vsock: drivers that send without copying spread a packet over many descriptors
//! (linux: net/vmw_vsock/virtio_transport.c, `virtio_transport_send_skb`), which that crate refuses.

/// Bytes of a header.
pub(super) const HEADER: usize = 44;
/// Most bytes of data in a packet.
pub(super) const MAX_DATA: u32 = 64 << 10;
/// The host's context id.
pub(super) const HOST_CID: u64 = 2;
/// Streams are the only type that is offered.
pub(super) const STREAM: u16 = 1;

/// What a packet is for.
pub(super) mod op {
    pub(in super::super) const REQUEST: u16 = 1;
    pub(in super::super) const RESPONSE: u16 = 2;
    pub(in super::super) const RESET: u16 = 3;
    pub(in super::super) const SHUTDOWN: u16 = 4;
    pub(in super::super) const DATA: u16 = 5;
    pub(in super::super) const CREDIT_UPDATE: u16 = 6;
    pub(in super::super) const CREDIT_REQUEST: u16 = 7;
}

/// Flags of [`op::SHUTDOWN`]: what the sender will not do any more.
pub(super) mod shutdown {
    pub(in super::super) const RECEIVE: u32 = 1;
    pub(in super::super) const SEND: u32 = 2;
}

/// The ports of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Ports {
    pub(super) host: u32,
    pub(super) guest: u32,
}

/// A header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Header {
    pub(super) source_cid: u64,
    pub(super) target_cid: u64,
    pub(super) source_port: u32,
    pub(super) target_port: u32,
    /// Bytes of data behind it.
    pub(super) len: u32,
    pub(super) kind: u16,
    pub(super) op: u16,
    pub(super) flags: u32,
    /// Bytes that the sender's buffer holds.
    pub(super) buffer: u32,
    /// Bytes that left the sender's buffer so far, modulo 2^32.
    pub(super) forwarded: u32,
}

impl Header {
    /// A packet from the host to guest `cid`.
    pub(super) fn to_guest(cid: u64, ports: Ports, op: u16) -> Self {
        Self {
            source_cid: HOST_CID,
            target_cid: cid,
            source_port: ports.host,
            target_port: ports.guest,
            kind: STREAM,
            op,
            ..Self::default()
        }
    }

    /// The ports of a packet from the guest.
    pub(super) fn ports(&self) -> Ports {
        Ports { host: self.target_port, guest: self.source_port }
    }

    pub(super) fn from_bytes(bytes: &[u8; HEADER]) -> Self {
        let mut reader = Reader(bytes);
        Self {
            source_cid: u64::from_le_bytes(reader.take()),
            target_cid: u64::from_le_bytes(reader.take()),
            source_port: u32::from_le_bytes(reader.take()),
            target_port: u32::from_le_bytes(reader.take()),
            len: u32::from_le_bytes(reader.take()),
            kind: u16::from_le_bytes(reader.take()),
            op: u16::from_le_bytes(reader.take()),
            flags: u32::from_le_bytes(reader.take()),
            buffer: u32::from_le_bytes(reader.take()),
            forwarded: u32::from_le_bytes(reader.take()),
        }
    }

    pub(super) fn to_bytes(self) -> Vec<u8> {
        [
            &self.source_cid.to_le_bytes()[..],
            &self.target_cid.to_le_bytes(),
            &self.source_port.to_le_bytes(),
            &self.target_port.to_le_bytes(),
            &self.len.to_le_bytes(),
            &self.kind.to_le_bytes(),
            &self.op.to_le_bytes(),
            &self.flags.to_le_bytes(),
            &self.buffer.to_le_bytes(),
            &self.forwarded.to_le_bytes(),
        ]
        .concat()
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (first, rest) = self.0.split_first_chunk().unwrap_or((&[0; N], &[]));
        self.0 = rest;
        *first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_written_as_it_is_read() {
        let bytes: [u8; HEADER] = std::array::from_fn(|n| u8::try_from(n).unwrap());
        let header = Header::from_bytes(&bytes);
        assert_eq!((header.source_port, header.op, header.forwarded), (0x1312_1110, 0x1F1E, 0x2B2A_2928));
        assert_eq!(header.to_bytes(), bytes);
    }
}
