//! What an error leaves in a port, and what a root port makes of reports.

use super::*;
use crate::errors::{PcieError, Recorded, Severity};
use crate::testing::FakeIntx;

const HEADER: [u32; 4] = [1, 2, 3, 4];

fn log(port: &Port) -> [u32; 4] {
    [0x11C, 0x120, 0x124, 0x128].map(|at| read(port, at))
}

/// A root port that reports everything and sends messages.
fn root() -> (Port, Arc<FakeMsi>) {
    let sent = Arc::default();
    let mut port = build_with(PortKind::Root, None, None, true, &sent);
    port.program();
    write(&mut port, 0x48, 0x200F);
    write(&mut port, 0x80, 0x0001_0000);
    write(&mut port, 0x12C, 7);
    (port, sent)
}

#[test]
fn each_error_sets_its_bit_and_its_device_status() {
    for (error, status, bit, device, severity) in [
        (PcieError::Receiver, 0x110, 0, 1, Severity::Correctable),
        (PcieError::ReplayTimeout, 0x110, 12, 1, Severity::Correctable),
        (PcieError::DataLinkProtocol, 0x104, 4, 4, Severity::Fatal),
        (PcieError::MalformedTlp, 0x104, 18, 4, Severity::Fatal),
        (PcieError::CompletionTimeout, 0x104, 14, 2, Severity::NonFatal),
        (PcieError::UnsupportedRequest, 0x104, 20, 0xA, Severity::NonFatal),
        (PcieError::AcsViolation, 0x104, 21, 2, Severity::NonFatal),
    ] {
        for kind in [PortKind::Root, PortKind::Upstream, PortKind::Downstream] {
            let mut port = build(kind, None);
            write(&mut port, 0x48, 0xF);
            assert_eq!(port.record(error, HEADER), Recorded::Reported(severity), "{error:?}");
            assert_eq!((read(&port, status), read(&port, 0x48) >> 16), (1 << bit, device), "{error:?} {kind:?}");
            write(&mut port, status, u32::MAX);
            assert_eq!(read(&port, status), 0, "software clears it");
        }
    }
}

#[test]
fn an_unsupported_request_is_reported_if_its_own_enable_is_on_as_well() {
    for (control, reported) in [(0x2, false), (0x8, false), (0xA, true), (0xD, false)] {
        let mut port = build(PortKind::Downstream, None);
        write(&mut port, 0x48, control);
        let expected = if reported { Recorded::Reported(Severity::NonFatal) } else { Recorded::Silently };
        assert_eq!(port.record(PcieError::UnsupportedRequest, HEADER), expected, "device control {control:#x}");
        assert_eq!(read(&port, 0x48) >> 16, 0xA);
    }
    let mut port = build(PortKind::Downstream, None);
    write(&mut port, 0x04, command::SERR);
    assert_eq!(port.record(PcieError::UnsupportedRequest, HEADER), Recorded::Reported(Severity::NonFatal), "SERR stands for all");
}

#[test]
fn an_error_is_reported_only_if_it_is_enabled_and_not_masked() {
    let mut port = build(PortKind::Downstream, None);
    assert_eq!(port.record(PcieError::Receiver, HEADER), Recorded::Silently, "nothing is enabled");
    assert_eq!(port.record(PcieError::CompletionTimeout, HEADER), Recorded::Silently);
    write(&mut port, 0x04, command::SERR);
    assert_eq!(port.record(PcieError::CompletionTimeout, HEADER), Recorded::Reported(Severity::NonFatal), "SERR stands for both");
    assert_eq!(port.record(PcieError::Receiver, HEADER), Recorded::Silently, "and not for correctable ones");
    write(&mut port, 0x48, 0xF);
    assert_eq!(port.record(PcieError::Internal, HEADER), Recorded::Silently, "masked from the start");
    assert_eq!(read(&port, 0x104) >> 22 & 1, 1, "but seen");
    write(&mut port, 0x10C, 1 << 14);
    assert_eq!(
        port.record(PcieError::CompletionTimeout, HEADER),
        Recorded::Reported(Severity::Fatal),
        "software sets the severity"
    );
    assert_eq!(
        build(PortKind::PciBridge, None).record(PcieError::Receiver, HEADER),
        Recorded::Nothing,
        "no error reporting there"
    );
}

#[test]
fn the_log_keeps_the_first_error_until_it_is_cleared() {
    let mut port = build(PortKind::Root, None);
    port.record(PcieError::Internal, [9; 4]);
    assert_eq!(log(&port), [0; 4], "a masked error is not logged");
    port.record(PcieError::UnsupportedRequest, HEADER);
    port.record(PcieError::CompletionTimeout, [5; 4]);
    assert_eq!((read(&port, 0x118) & 0x1F, log(&port)), (20, HEADER));
    write(&mut port, 0x104, u32::MAX);
    port.record(PcieError::CompletionTimeout, [5; 4]);
    assert_eq!((read(&port, 0x118) & 0x1F, log(&port)), (14, [5; 4]));
}

#[test]
fn a_root_port_keeps_the_first_source_of_each_kind() {
    let (mut port, _) = root();
    port.collect(Severity::Correctable, 0x0100);
    assert_eq!((read(&port, 0x130), read(&port, 0x134)), (1, 0x0100));
    port.collect(Severity::Fatal, 0x0200);
    assert_eq!((read(&port, 0x130), read(&port, 0x134)), (1 | 4 | 0x10 | 0x40, 0x0200_0100));
    for (severity, source) in [(Severity::Correctable, 0x0300), (Severity::NonFatal, 0x0400)] {
        port.collect(severity, source);
    }
    assert_eq!((read(&port, 0x130), read(&port, 0x134)), (0x7F, 0x0200_0100));
    write(&mut port, 0x130, 0x7F);
    port.collect(Severity::NonFatal, 0x0400);
    assert_eq!((read(&port, 0x130), read(&port, 0x134)), (4 | 0x20, 0x0400_0100));
}

#[test]
fn a_report_is_one_message_until_it_is_cleared() {
    let (mut port, sent) = root();
    port.collect(Severity::Correctable, 1);
    port.collect(Severity::Fatal, 1);
    assert_eq!(sent.take().len(), 1);
    write(&mut port, 0x130, 1);
    assert_eq!(sent.take().len(), 0, "the fatal one is still there");
    write(&mut port, 0x130, 0x7E);
    port.collect(Severity::Correctable, 1);
    assert_eq!(sent.take().len(), 1);
    write(&mut port, 0x12C, 0);
    write(&mut port, 0x12C, 1);
    assert_eq!(sent.take().len(), 1, "an enable over a pending report");
    let mut other = build(PortKind::Downstream, None);
    other.collect(Severity::Fatal, 1);
    assert_eq!(read(&other, 0x130), 0, "only root ports collect");
}

#[test]
fn slot_and_errors_share_the_wire() {
    let hotplug = Some(HotPlug::default());
    let mut port = build_with(PortKind::Root, None, hotplug, false, &Arc::default());
    let wire = FakeIntx::default();
    port.connect(Box::new(wire.clone()));
    port.program();
    write(&mut port, 0x58, 0x1028);
    write(&mut port, 0x12C, 7);
    port.insert().unwrap();
    port.collect(Severity::Fatal, 1);
    write(&mut port, 0x58, 0x0108_1028);
    assert!(wire.level(), "the report is still there");
    write(&mut port, 0x130, 0x7F);
    assert_eq!(wire.levels(), [true, false]);
}

#[test]
fn a_report_from_below_leaves_its_mark_in_each_bridge() {
    for (control, command, up, signaled) in [(0, command::SERR, false, 0), (2, 0, true, 0), (2, command::SERR, true, 1)] {
        let mut port = build(PortKind::Upstream, None);
        write(&mut port, 0x3C, control << 16);
        write(&mut port, 0x04, command);
        assert_eq!(port.forward_error(Severity::Correctable), up);
        assert_eq!(read(&port, 0x1C) >> 30, 0, "correctable ones leave none");
        assert_eq!(port.forward_error(Severity::NonFatal), up);
        let marks = (read(&port, 0x1C) >> 30 & 1, read(&port, 0x04) >> 30 & 1);
        assert_eq!(marks, (1, signaled), "received on the secondary side, signaled on the primary one");
        write(&mut port, 0x1C, u32::MAX);
        write(&mut port, 0x04, u32::MAX);
        assert_eq!((read(&port, 0x1C) >> 30, read(&port, 0x04) >> 30), (0, 0), "software clears them");
    }
}
