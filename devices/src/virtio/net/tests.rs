use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};

use super::*;
use crate::virtio::limit::BucketSpec;
use crate::virtio::testing::{DATA, Driver, WRITE, heard, survives_hostile_rings};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
const ALL: Offloads = Offloads { checksum: true, tcp4: true, tcp6: true, ecn: true, udp: true };

/// An interface of `pairs` pairs, and the far ends of its taps.
fn interface(pairs: usize, limit: LimitSpec) -> (Net, Vec<OwnedFd>) {
    let pair = |_| {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (near, far) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (Arc::new(Tap::stand_in(near)), far)
    };
    let (taps, far) = (0..pairs).map(pair).unzip();
    let spec = NetSpec { taps, mac: MAC, mtu: Some(1400), queue_size: 64, offloads: ALL, limit };
    (Net::new("test", spec).unwrap(), far)
}

fn one() -> (Driver<Net>, OwnedFd) {
    let (net, mut far) = interface(1, LimitSpec::default());
    (Driver::started(net), far.remove(0))
}

fn send(far: &OwnedFd, packet: &[u8]) {
    rustix::net::send(far, packet, SendFlags::empty()).unwrap();
}

fn received(driver: &mut Driver<Net>, far: &OwnedFd) -> Vec<u8> {
    let mut packet = vec![0; 1 << 17];
    let mut len = None;
    driver.wait("a packet", |_| {
        len = rustix::io::read(far.as_fd(), &mut packet).ok();
        len.is_some()
    });
    packet.truncate(len.unwrap());
    packet
}

fn packet(len: usize) -> Vec<u8> {
    (0..len).map(|n| if n < HEADER { 0 } else { (n % 251).try_into().unwrap() }).collect()
}

#[test]
fn the_configuration_tells_address_pairs_and_mtu() {
    let (net, _far) = interface(4, LimitSpec::default());
    let mut driver = Driver::started(net);
    assert_eq!(driver.config::<6>(0), MAC);
    assert_eq!((driver.config(6), driver.config(8), driver.config(10)), ([1, 0], [4, 0], 1400_u16.to_le_bytes()));
}

#[test]
fn a_packet_of_the_guest_leaves_whole_and_its_buffer_comes_back() {
    let (mut driver, far) = one();
    let sent = packet(1000);
    driver.put(DATA, &sent);
    let head = driver.send(1, &[(DATA, 12, 0), (DATA + 12, 500, 0), (DATA + 512, 488, 0)]);
    assert!(received(&mut driver, &far) == sent);
    assert_eq!(driver.answer(1).head, head);
    let tap = &driver.function.device().spec.taps[0];
    assert_eq!((tap.sent().count(), tap.sent().bytes(), tap.received().count()), (1, 988, 0), "without the header");
    driver.wait("an interrupt", |driver| driver.sent().contains(&0x42));
}

#[test]
fn a_packet_for_the_guest_lies_in_as_many_buffers_as_it_needs() {
    let (mut driver, far) = one();
    let heads: Vec<_> = (0..64).map(|n| driver.offer(0, &[(DATA + 0x1000 * n, 1536, WRITE)])).collect();
    driver.ring(0);
    let sent = packet(4000);
    send(&far, &sent);
    let used: Vec<_> = (0..3).map(|_| driver.answer(0)).collect();
    assert_eq!(used.iter().map(|used| used.head).collect::<Vec<_>>(), heads[..3]);
    assert_eq!(used.iter().map(|used| used.len).collect::<Vec<_>>(), [1536, 1536, 928]);
    let got = [driver.bytes(DATA, 1536), driver.bytes(DATA + 0x1000, 1536), driver.bytes(DATA + 0x2000, 928)].concat();
    assert_eq!(got[10..12], [3, 0], "number of buffers");
    assert!(got[12..] == sent[12..]);
    let tap = &driver.function.device().spec.taps[0];
    assert_eq!((tap.received().count(), tap.received().bytes(), tap.sent().count()), (1, 3988, 0), "without the header");
    assert_eq!(driver.poll(0), None);
    driver.wait("an interrupt", |driver| driver.sent().contains(&0x41));
    // The buffers that were looked at and not needed serve the next packet.
    send(&far, &packet(60));
    assert_eq!((driver.answer(0).head, driver.bytes(DATA + 0x3000 + 10, 2)), (heads[3], vec![1, 0]));
}

#[test]
fn a_packet_waits_for_room() {
    let (mut driver, far) = one();
    send(&far, &packet(100));
    std::thread::sleep(Duration::from_millis(5));
    for n in 0..64 {
        driver.send(0, &[(DATA + 0x1000 * n, 2048, WRITE)]);
    }
    assert_eq!(driver.answer(0).len, 100);
}

#[test]
fn without_mergeable_buffers_a_packet_has_one() {
    let (net, mut far) = interface(1, LimitSpec::default());
    let mut driver = Driver::new(net);
    driver.set_up(!(1 << VIRTIO_NET_F_MRG_RXBUF));
    driver.send(0, &[(DATA, 12, WRITE), (DATA + 0x1000, 0x1_1000, WRITE)]);
    let sent = packet(65_000);
    send(&far.remove(0), &sent);
    assert_eq!(driver.answer(0).len, 65_000);
    assert!(driver.bytes(DATA + 0x1000, 65_000 - 12) == sent[12..]);
}

#[test]
fn pairs_are_used_once_the_driver_says_so() {
    let (net, far) = interface(2, LimitSpec::default());
    let mut driver = Driver::started(net);
    driver.put(DATA, &packet(100));
    driver.send(3, &[(DATA, 100, 0)]);
    assert_eq!(received(&mut driver, &far[1]).len(), 100);
    // Sockets know no queues to attach, so the answer of a tap is not seen here; what no tap has is refused.
    for (command, expected) in
        [(&[4, 0, 3, 0][..], 1), (&[4, 0, 0, 0], 1), (&[4, 9, 1, 0], 1), (&[5, 0, 0, 0, 0, 0, 0, 0, 0, 0], 0)]
    {
        driver.put(DATA + 0x1000, command);
        driver.put(DATA + 0x2000, &[0xEE]);
        let len = u32::try_from(command.len()).unwrap();
        driver.send(4, &[(DATA + 0x1000, len, 0), (DATA + 0x2000, 1, WRITE)]);
        assert_eq!(driver.answer(4).len, 1);
        assert_eq!(driver.bytes(DATA + 0x2000, 1), [expected], "{command:?}");
    }
}

#[test]
fn a_limit_delays_and_loses_nothing() {
    let slow = BucketSpec { size: 1, burst: 0, refill: Duration::from_millis(2) };
    let (net, mut far) = interface(1, LimitSpec { bytes: None, requests: Some(slow) });
    let (mut driver, far) = (Driver::started(net), far.remove(0));
    driver.put(DATA, &packet(64));
    for _ in 0..20 {
        driver.send(1, &[(DATA, 64, 0)]);
    }
    for _ in 0..20 {
        received(&mut driver, &far);
    }
}

#[test]
fn a_tap_that_is_gone_loses_packets_and_nothing_else() {
    let (mut driver, far) = one();
    let heard = heard(&mut driver.function);
    drop(far);
    driver.put(DATA, &packet(64));
    for n in 0..20 {
        driver.send(1, &[(DATA, 64, 0)]);
        driver.send(0, &[(DATA + 0x1000 * (n + 1), 2048, WRITE)]);
        driver.answer(1);
    }
    assert!(!driver.gave_up());
    let heard = heard.lock().unwrap();
    assert!((1..=8).contains(&heard.len()) && heard[0].starts_with("test: the tap "), "{heard:?}");
}

#[test]
fn packets_that_are_not_well_formed_are_no_failure_of_the_tap() {
    // As a tap does with a bad header, it takes no 2^64 - 1 (eventfd(2)).
    let strict = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    let (mut net, _far) = interface(1, LimitSpec::default());
    net.spec.taps = vec![Arc::new(Tap::stand_in(strict))];
    let mut driver = Driver::started(net);
    let heard = heard(&mut driver.function);
    driver.put(DATA, &[0xFF; 64]);
    for _ in 0..20 {
        driver.send(1, &[(DATA, 64, 0)]);
        driver.answer(1);
    }
    assert!(!driver.gave_up());
    assert_eq!(*heard.lock().unwrap(), [""; 0]);
}

#[test]
fn packets_larger_than_can_be_are_lost_and_shorter_ones_are_an_error() {
    let (mut driver, far) = one();
    driver.put(DATA, &packet(64));
    driver.send(1, &[(DATA, 0x2_0000, 0)]);
    driver.send(1, &[(DATA, 64, 0)]);
    assert_eq!(received(&mut driver, &far).len(), 64);
    driver.send(1, &[(DATA, 11, 0)]);
    driver.wait("the device to give up", Driver::gave_up);
}

#[test]
fn the_device_can_be_reset_and_started_again() {
    let (mut driver, far) = one();
    for _ in 0..10 {
        driver.write(0x14, &[0]);
        driver.set_up(u64::MAX);
        driver.put(DATA, &packet(64));
        driver.send(1, &[(DATA, 64, 0)]);
        assert_eq!(received(&mut driver, &far).len(), 64);
    }
}

#[test]
fn hostile_rings_do_no_harm() {
    survives_hostile_rings(|| interface(2, LimitSpec::default()).0);
}
