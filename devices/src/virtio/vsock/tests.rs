use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use super::packet::{HEADER, Header, Ports, op, shutdown};
use super::stream::BUFFER;
use super::traffic::{MAX_GREETINGS, MAX_STREAMS};
use super::*;
use crate::virtio::testing::{DATA, Driver, WRITE, survives_hostile_rings};

const CID: u32 = 42;
/// What the guest's driver says that it has room for.
const ROOM: u32 = 256 << 10;
/// Receive buffers of the driver: one behind the other from here.
const BUFFERS: u64 = DATA;
const BUFFER_SIZE: u32 = 4096;
const COUNT: u64 = 32;
/// Where packets to be sent lie.
const OUTGOING: u64 = DATA + (4 << 20);

fn spec(directory: &Path) -> VsockSpec {
    let path = directory.join("v.sock");
    // A device that is made again has the same socket.
    let _ = std::fs::remove_file(&path);
    VsockSpec { cid: CID, listener: UnixListener::bind(&path).unwrap(), path }
}

/// A guest's driver with its buffers, and the directory that holds the host's sockets.
struct Guest {
    driver: Driver<Vsock>,
    directory: tempfile::TempDir,
    /// Address of each receive buffer by its head.
    posted: std::collections::HashMap<u16, u64>,
    sent: std::collections::HashMap<Ports, u32>,
}

impl Guest {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let vsock = Vsock::new("vsock0", spec(directory.path())).unwrap();
        let mut guest = Self { driver: Driver::started(vsock), directory, posted: Default::default(), sent: Default::default() };
        guest.post_all();
        guest
    }

    fn post_all(&mut self) {
        for n in 0..COUNT {
            self.post(BUFFERS + n * u64::from(BUFFER_SIZE));
        }
    }

    fn post(&mut self, at: u64) {
        let head = self.driver.send(RECEIVE, &[(at, BUFFER_SIZE, WRITE)]);
        self.posted.insert(head, at);
    }

    fn client(&self) -> UnixStream {
        let client = UnixStream::connect(self.directory.path().join("v.sock")).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        client
    }

    fn dial(&self, port: u32) -> UnixStream {
        let mut client = self.client();
        client.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
        client
    }

    fn try_next(&mut self) -> Option<(Header, Vec<u8>)> {
        let used = self.driver.poll(RECEIVE)?;
        let at = self.posted.remove(&used.head).unwrap();
        let bytes = self.driver.bytes(at, usize::try_from(used.len).unwrap());
        let (header, data) = bytes.split_first_chunk::<HEADER>().unwrap();
        let header = Header::from_bytes(header);
        assert_eq!(usize::try_from(header.len).unwrap(), data.len());
        assert_eq!((header.source_cid, header.target_cid), (2, u64::from(CID)));
        let data = data.to_vec();
        self.post(at);
        Some((header, data))
    }

    fn next(&mut self) -> (Header, Vec<u8>) {
        let limit = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(packet) = self.try_next() {
                return packet;
            }
            assert!(Instant::now() < limit, "no packet comes");
            std::thread::yield_now();
        }
    }

    fn expect(&mut self, op: u16) -> Header {
        let (header, _) = self.next();
        assert_eq!(header.op, op, "{header:?}");
        header
    }

    fn silent(&mut self) {
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(self.try_next(), None);
    }

    fn header(&self, ports: Ports, op: u16) -> Header {
        let (source_port, target_port) = (ports.guest, ports.host);
        let (source_cid, target_cid) = (u64::from(CID), 2);
        Header { source_cid, target_cid, source_port, target_port, kind: 1, op, buffer: ROOM, ..Header::default() }
    }

    fn send(&mut self, header: Header, data: &[u8]) {
        let header = Header { len: u32::try_from(data.len()).unwrap(), ..header };
        self.send_raw(&header.to_bytes(), data);
    }

    fn send_raw(&mut self, header: &[u8], data: &[u8]) {
        self.driver.put(OUTGOING, header);
        self.driver.put(OUTGOING + 0x1000, data);
        let mut parts = vec![(OUTGOING, u32::try_from(header.len()).unwrap(), 0)];
        if !data.is_empty() {
            // In pieces, as a driver that copies nothing sends it.
            let (first, rest) = (data.len() / 3, data.len() - data.len() / 3);
            parts.push((OUTGOING + 0x1000, u32::try_from(first).unwrap(), 0));
            parts.push((OUTGOING + 0x1000 + first as u64, u32::try_from(rest).unwrap(), 0));
        }
        self.driver.send(TRANSMIT, &parts);
        self.driver.answer(TRANSMIT);
    }

    fn say(&mut self, ports: Ports, op: u16) {
        self.send(self.header(ports, op), &[]);
    }

    fn data(&mut self, ports: Ports, data: &[u8]) {
        self.send(self.header(ports, op::DATA), data);
    }

    /// A client of the host that is connected to `port` of the guest.
    fn connected(&mut self, port: u32) -> (UnixStream, Ports) {
        let client = self.dial(port);
        let request = self.expect(op::REQUEST);
        assert_eq!(request.target_port, port);
        let ports = Ports { host: request.source_port, guest: request.target_port };
        self.say(ports, op::RESPONSE);
        let mut line = [0; 16];
        let got = (&client).read(&mut line).unwrap();
        assert_eq!(line[..got], *format!("OK {}\n", ports.host).as_bytes());
        (client, ports)
    }

    /// Bytes of one stream until it ends or `len` are there; the guest takes them all.
    fn collect(&mut self, ports: Ports, len: usize) -> Vec<u8> {
        let mut got = Vec::new();
        while got.len() < len {
            let (header, data) = self.next();
            match header.op {
                op::DATA => got.extend(data),
                op::CREDIT_REQUEST => {}
                _ => panic!("{header:?}"),
            }
            let sum = self.sent.entry(ports).or_default();
            *sum += header.len;
            let forwarded = *sum;
            let header = Header { forwarded, ..self.header(ports, op::CREDIT_UPDATE) };
            self.send(header, &[]);
        }
        got
    }
}

fn ended(client: &mut UnixStream) -> bool {
    matches!(client.read(&mut [0; 64]), Ok(0))
}

fn noise(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 7 % 251).to_le_bytes()[0]).collect()
}

#[test]
fn a_client_of_the_host_talks_with_the_guest_in_both_directions() {
    let mut guest = Guest::new();
    assert_eq!(guest.driver.config(0), u64::from(CID).to_le_bytes());
    let (mut client, ports) = guest.connected(1024);
    client.write_all(b"question").unwrap();
    let (header, data) = guest.next();
    assert_eq!((header.op, data.as_slice(), header.buffer), (op::DATA, b"question".as_slice(), BUFFER));
    guest.data(ports, b"an answer");
    let mut answer = [0; 9];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"an answer");
}

#[test]
fn case_g6_a_client_is_turned_away_at_once_while_nobody_listens() {
    let mut guest = Guest::new();
    for _ in 0..50 {
        let mut client = guest.dial(1024);
        let request = guest.expect(op::REQUEST);
        guest.say(Ports { host: request.source_port, guest: 1024 }, op::RESET);
        assert!(ended(&mut client));
    }
    guest.connected(1024);
}

#[test]
fn case_g6_a_client_waits_for_a_guest_without_a_driver() {
    let directory = tempfile::tempdir().unwrap();
    let vsock = Vsock::new("vsock0", spec(directory.path())).unwrap();
    let mut guest = Guest { driver: Driver::new(vsock), directory, posted: Default::default(), sent: Default::default() };
    let mut early = guest.dial(7);
    early.write_all(b"early").unwrap();
    guest.driver.set_up(u64::MAX);
    guest.post_all();
    let request = guest.expect(op::REQUEST);
    let ports = Ports { host: request.source_port, guest: 7 };
    guest.silent();
    guest.say(ports, op::RESPONSE);
    assert_eq!(guest.collect(ports, 5), b"early");
}

#[test]
fn the_guest_reaches_a_listener_of_the_host_and_nobody_else() {
    let mut guest = Guest::new();
    let ports = Ports { host: 5000, guest: 99 };
    guest.say(ports, op::REQUEST);
    let refused = guest.expect(op::RESET);
    assert_eq!((refused.source_port, refused.target_port), (5000, 99));
    let listener = UnixListener::bind(guest.directory.path().join("v.sock_5000")).unwrap();
    guest.say(ports, op::REQUEST);
    guest.expect(op::RESPONSE);
    let (mut accepted, _) = listener.accept().unwrap();
    guest.data(ports, b"hello");
    let mut got = [0; 5];
    accepted.read_exact(&mut got).unwrap();
    accepted.write_all(b"world").unwrap();
    assert_eq!(guest.collect(ports, 5), b"world");
    guest.say(ports, op::REQUEST);
    guest.expect(op::RESET);
    assert!(ended(&mut accepted), "a second request for one stream ends it");
}

#[test]
fn each_side_can_end_its_half() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected(1);
    client.write_all(b"last words").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(guest.collect(ports, 10), b"last words");
    assert_eq!(guest.expect(op::SHUTDOWN).flags, shutdown::SEND);
    guest.data(ports, b"still heard");
    let mut got = [0; 11];
    client.read_exact(&mut got).unwrap();
    guest.send(Header { flags: shutdown::SEND, ..guest.header(ports, op::SHUTDOWN) }, &[]);
    assert!(ended(&mut client));
    assert_eq!(guest.expect(op::SHUTDOWN).flags, shutdown::SEND | shutdown::RECEIVE);

    let (mut client, ports) = guest.connected(1);
    guest.data(ports, b"all");
    guest.send(Header { flags: shutdown::SEND, ..guest.header(ports, op::SHUTDOWN) }, &[]);
    let mut got = Vec::new();
    client.read_to_end(&mut got).unwrap();
    assert_eq!(got, b"all");
    client.write_all(b"reply").unwrap();
    assert_eq!(guest.collect(ports, 5), b"reply");
    guest.send(Header { flags: shutdown::RECEIVE, ..guest.header(ports, op::SHUTDOWN) }, &[]);
    guest.expect(op::RESET);
}

#[test]
fn the_host_s_last_words_arrive_before_its_end() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected(1);
    let sent = noise(100_000);
    client.write_all(&sent).unwrap();
    drop(client);
    assert_eq!(guest.collect(ports, sent.len()), sent);
    // That nobody sends may be seen before that nobody receives.
    while guest.expect(op::SHUTDOWN).flags != shutdown::SEND | shutdown::RECEIVE {}
    guest.data(ports, b"too late");
    guest.expect(op::RESET);
}

#[test]
fn the_guest_s_last_words_arrive_before_its_end() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected(1);
    // More than the kernel keeps for a client that does not read.
    let sent = noise(30_000);
    let mut total = 0;
    let mut credit = 0;
    loop {
        guest.data(ports, &sent);
        total += sent.len();
        std::thread::sleep(Duration::from_millis(1));
        while let Some((header, _)) = guest.try_next() {
            credit = usize::try_from(header.forwarded).unwrap();
        }
        if total - credit + sent.len() > usize::try_from(BUFFER).unwrap() {
            break;
        }
    }
    let both = shutdown::SEND | shutdown::RECEIVE;
    guest.send(Header { flags: both, ..guest.header(ports, op::SHUTDOWN) }, &[]);
    // A driver that has waited long enough.
    guest.say(ports, op::RESET);
    let mut got = Vec::new();
    client.read_to_end(&mut got).unwrap();
    assert!(got == sent.repeat(total / sent.len()), "{} of {total}", got.len());
}

#[test]
fn data_keeps_to_the_guest_s_credit() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected(1);
    let room = 10_000;
    guest.send(Header { buffer: room, ..guest.header(ports, op::CREDIT_UPDATE) }, &[]);
    let sent = noise(50_000);
    client.write_all(&sent).unwrap();
    let mut got = Vec::new();
    loop {
        let (header, data) = guest.next();
        if header.op == op::CREDIT_REQUEST {
            break;
        }
        got.extend(data);
    }
    assert_eq!(got.len(), usize::try_from(room).unwrap());
    guest.silent();
    let taken = Header { buffer: room, forwarded: 10, ..guest.header(ports, op::CREDIT_UPDATE) };
    guest.send(taken, &[]);
    let (header, data) = guest.next();
    assert_eq!((header.op, data.as_slice()), (op::DATA, &sent[10_000..10_010]));
    guest.expect(op::CREDIT_REQUEST);
    // Numbers that contradict each other give no credit, and break nothing.
    guest.send(Header { buffer: room, forwarded: 0x8000_0000, ..guest.header(ports, op::CREDIT_UPDATE) }, &[]);
    guest.expect(op::CREDIT_REQUEST);
    guest.silent();
}

#[test]
fn a_guest_that_sends_more_than_it_may_loses_the_stream() {
    let mut guest = Guest::new();
    let (_client, ports) = guest.connected(1);
    let part = noise(60_000);
    for _ in 0..20 {
        guest.data(ports, &part);
        std::thread::sleep(Duration::from_millis(1));
        while let Some((header, _)) = guest.try_next() {
            if header.op == op::RESET {
                return;
            }
        }
    }
    panic!("the buffer has no bound");
}

#[test]
fn the_guest_is_asked_and_answers_about_credit() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected(1);
    guest.data(ports, b"12345");
    client.read_exact(&mut [0; 5]).unwrap();
    guest.say(ports, op::CREDIT_REQUEST);
    let update = guest.expect(op::CREDIT_UPDATE);
    assert_eq!((update.buffer, update.forwarded), (BUFFER, 5));
    guest.data(ports, &noise(40_000));
    client.read_exact(&mut [0; 40_000]).unwrap();
    assert!(guest.expect(op::CREDIT_UPDATE).forwarded > 16_000);
}

#[test]
fn hundreds_of_streams_carry_their_own_bytes() {
    let mut guest = Guest::new();
    let mut streams: Vec<_> = (0..300).map(|n| guest.connected(1000 + n)).collect();
    for (n, (client, _)) in streams.iter_mut().enumerate() {
        client.write_all(&noise(n + 1)).unwrap();
    }
    let mut got = std::collections::HashMap::<Ports, Vec<u8>>::new();
    while got.values().map(Vec::len).sum::<usize>() < (1..=300).sum() {
        let (header, data) = guest.next();
        assert_eq!(header.op, op::DATA);
        got.entry(Ports { host: header.source_port, guest: header.target_port }).or_default().extend(data);
    }
    for (n, (_, ports)) in streams.iter().enumerate() {
        assert_eq!(got[ports], noise(n + 1));
    }
    for (n, (client, ports)) in streams.iter_mut().enumerate() {
        guest.data(*ports, &n.to_le_bytes());
        let mut echo = [0; 8];
        client.read_exact(&mut echo).unwrap();
        assert_eq!(echo, n.to_le_bytes());
    }
}

#[test]
fn clients_that_come_all_at_once_are_all_served() {
    let mut guest = Guest::new();
    guest.driver.write(0x14, &[0]);
    // All of them are there before the device looks.
    let clients: Vec<_> = (0..100).map(|_| guest.dial(5)).collect();
    guest.posted.clear();
    guest.driver.set_up(u64::MAX);
    guest.post_all();
    let more: Vec<_> = (0..MAX_GREETINGS + 100).map(|_| guest.dial(5)).collect();
    for _ in 0..clients.len() + more.len() {
        guest.expect(op::REQUEST);
    }
}

#[test]
fn case_g5_bad_clients_are_closed_and_others_go_on() {
    let mut guest = Guest::new();
    let (mut good, ports) = guest.connected(1);
    let mut part = guest.client();
    part.write_all(b"CONNECT 10").unwrap();
    drop(part);
    let mut junk = guest.client();
    // It may be turned away before all is written.
    let _ = junk.write_all(&[b'x'; 200]);
    assert!(junk.read(&mut [0; 8]).map_or(true, |count| count == 0));
    let idle: Vec<_> = (0..MAX_GREETINGS + 50).map(|_| guest.client()).collect();
    let mut oldest = &idle[0];
    assert!(matches!(oldest.read(&mut [0; 8]), Ok(0)), "the oldest gave way");
    let in_the_middle = guest.dial(9);
    guest.expect(op::REQUEST);
    drop(in_the_middle);
    guest.expect(op::RESET);
    good.write_all(b"well").unwrap();
    assert_eq!(guest.collect(ports, 4), b"well");
    let _second = guest.connected(2);
    drop(idle);
    guest.connected(3);
}

#[test]
fn streams_have_a_limit_and_room_again_afterwards() {
    let mut guest = Guest::new();
    let _listener = UnixListener::bind(guest.directory.path().join("v.sock_1")).unwrap();
    // Without a process that accepts, the listener's queue is the limit; either way the guest hears of it.
    let (mut opened, mut refused) = (0, 0);
    for n in 0..u32::try_from(MAX_STREAMS).unwrap() + 10 {
        guest.say(Ports { host: 1, guest: n }, op::REQUEST);
        match guest.next().0.op {
            op::RESPONSE => opened += 1,
            op::RESET => refused += 1,
            other => panic!("{other}"),
        }
    }
    assert!(opened > 50 && refused >= 10, "{opened} {refused}");
    for n in 0..opened {
        guest.say(Ports { host: 1, guest: n }, op::RESET);
    }
    guest.connected(5);
}

#[test]
fn packets_that_make_no_sense_break_nothing() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected(1);
    let unknown = Ports { host: 77, guest: 88 };
    let lost = [
        Header { source_cid: 3, ..guest.header(ports, op::SHUTDOWN) },
        Header { target_cid: 1, ..guest.header(ports, op::SHUTDOWN) },
        Header { target_cid: u64::MAX, ..guest.header(ports, op::RESET) },
    ];
    for header in lost {
        guest.send(header, &[]);
    }
    for op in [0, op::RESPONSE, op::SHUTDOWN, op::DATA, op::CREDIT_REQUEST, 8, 0xFFFF] {
        guest.say(unknown, op);
        let reset = guest.expect(op::RESET);
        assert_eq!((reset.source_port, reset.target_port), (77, 88), "{op}");
    }
    guest.say(unknown, op::RESET);
    guest.send(Header { kind: 2, ..guest.header(unknown, op::REQUEST) }, &[]);
    assert_eq!(guest.expect(op::RESET).kind, 2);
    client.write_all(b"fine").unwrap();
    assert_eq!(guest.collect(ports, 4), b"fine");
    guest.say(ports, 0xFFFF);
    guest.expect(op::RESET);
    assert!(ended(&mut client));
}

#[test]
fn broken_packets_need_a_reset() {
    for (header, data) in [
        (vec![0; HEADER - 1], vec![]),
        (Header { len: 10, source_cid: 42, target_cid: 2, ..Header::default() }.to_bytes(), vec![0; 9]),
        (Header { len: u32::MAX, source_cid: 42, target_cid: 2, ..Header::default() }.to_bytes(), vec![0; 9]),
    ] {
        let mut guest = Guest::new();
        guest.driver.put(OUTGOING, &header);
        guest.driver.put(OUTGOING + 0x1000, &data);
        let len = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap();
        guest.driver.send(TRANSMIT, &[(OUTGOING, len(&header), 0), (OUTGOING + 0x1000, len(&data), 0)]);
        guest.driver.wait("giving up", Driver::gave_up);
    }
    let mut guest = Guest::new();
    guest.driver.write(0x14, &[0]);
    guest.driver.set_up(u64::MAX);
    guest.driver.send(RECEIVE, &[(BUFFERS, 43, WRITE)]);
    let _client = guest.dial(1);
    guest.driver.wait("giving up", Driver::gave_up);
}

#[test]
fn a_flood_of_requests_waits_for_a_guest_that_takes_no_answers() {
    let mut guest = Guest::new();
    guest.driver.write(0x14, &[0]);
    guest.driver.set_up(u64::MAX);
    guest.posted.clear();
    let packet = guest.header(Ports { host: 1, guest: 1 }, op::DATA).to_bytes();
    guest.driver.put(OUTGOING, &packet);
    let (mut sent, mut taken) = (0, 0);
    while sent - taken < 60 {
        guest.driver.send(TRANSMIT, &[(OUTGOING, 44, 0)]);
        sent += 1;
        std::thread::sleep(Duration::from_micros(500));
        while guest.driver.poll(TRANSMIT).is_some() {
            taken += 1;
        }
        assert!(sent < 300, "the guest is listened to without a bound");
    }
    // All are answered once there is room.
    guest.post_all();
    for _ in 0..sent {
        guest.expect(op::RESET);
    }
    guest.silent();
    while guest.driver.poll(TRANSMIT).is_some() {
        taken += 1;
    }
    assert_eq!(taken, sent);
    guest.connected(3);
}

#[test]
fn a_reset_ends_streams_and_keeps_the_socket() {
    let mut guest = Guest::new();
    for round in 0..10 {
        let (mut client, _) = guest.connected(round);
        guest.driver.write(0x14, &[0]);
        assert!(ended(&mut client));
        let waiting = guest.dial(100);
        guest.posted.clear();
        guest.driver.set_up(u64::MAX);
        guest.post_all();
        let request = guest.expect(op::REQUEST);
        guest.say(Ports { host: request.source_port, guest: 100 }, op::RESPONSE);
        let mut line = [0; 3];
        (&waiting).read_exact(&mut line).unwrap();
        assert_eq!(&line, b"OK ");
        drop(waiting);
        guest.expect(op::SHUTDOWN);
    }
}

#[test]
fn hostile_rings_neither_panic_nor_hang() {
    let directory = tempfile::tempdir().unwrap();
    survives_hostile_rings(|| Vsock::new("vsock0", spec(directory.path())).unwrap());
}
