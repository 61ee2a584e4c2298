mod hostile;
mod process;

use std::time::{Duration, Instant};

use pci::emulated::Attachment;
use pci::testing::FakeMsi;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use process::{BACKEND_REQ, CONFIG, GOOD, MQ, Manners, PROTOCOL, Process, REPLY_ACK, SLOTS, serve, serve_in};

use super::connection::Handed;
use super::*;
use crate::virtio::Memory;
use crate::virtio::testing::{DATA, Driver, RAM, WRITE};

fn folder() -> RemoteSpec {
    RemoteSpec { served: Served::Folder { tag: "home".into() }, queues: 1, queue_size: 128 }
}

fn shared_memory() -> GuestMemoryMmap {
    let file = tempfile::tempfile().unwrap();
    file.set_len(RAM as u64).unwrap();
    GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), RAM, Some(FileOffset::new(file, 0)))]).unwrap()
}

fn started(server: &Process) -> Driver<Remote> {
    started_as(&folder(), server)
}

fn started_as(spec: &RemoteSpec, server: &Process) -> Driver<Remote> {
    let mut driver = Driver::with_memory(server.remote(spec), shared_memory());
    driver.set_up(u64::MAX);
    driver
}

fn disk(queues: u16) -> RemoteSpec {
    RemoteSpec { served: Served::Disk, queues, queue_size: 128 }
}

fn interface(queues: u16) -> RemoteSpec {
    let offloads = Offloads { checksum: true, tcp4: true, tcp6: true, ecn: true, udp: false };
    RemoteSpec { served: Served::Net { mac: [2, 0, 0, 0, 0, 9], mtu: Some(9000), offloads }, queues, queue_size: 128 }
}

#[test]
fn case_g7_what_both_sides_know_is_negotiated() {
    let server = serve(GOOD);
    let mut driver = started(&server);
    assert_eq!((driver.config::<5>(0), driver.config::<4>(36)), (*b"home\0", [1, 0, 0, 0]));
    driver.wait("an interrupt of the second queue", |driver| driver.sent().contains(&0x42));
    driver.send(1, &[(DATA, 16, 0), (DATA + 64, 16, WRITE)]);
    driver.write(0x14, &[0]);
    drop(driver);
    let requests = server.end();
    assert!(requests.contains(&(16, MQ | REPLY_ACK | CONFIG)), "no unknown feature is taken: {requests:?}");
    let features = requests.iter().find(|(request, _)| *request == 2).unwrap().1;
    assert_eq!(features, feature::TRANSPORT | PROTOCOL);
    let order: Vec<_> = requests.iter().map(|(request, _)| *request).collect();
    let first = |request| order.iter().position(|other| *other == request).unwrap();
    assert!(first(3) < first(5) && first(5) < first(9) && first(12) < first(18) && first(18) < first(11), "{order:?}");
}

#[test]
fn the_server_s_interrupts_are_delivered_by_the_machine_from_the_start_to_the_reset() {
    let server = serve(GOOD);
    let mut driver = started(&server);
    driver.wait("both queues to have their messages", |driver| driver.events() == [Some(0x41), Some(0x42)]);
    driver.write(0x100C + 32, &[1, 0, 0, 0]);
    assert_eq!(driver.events(), [Some(0x41), None], "its vector is masked");
    driver.write(0x14, &[0]);
    assert_eq!(driver.events(), []);
    drop(driver);
    server.end();
}

#[test]
fn a_server_that_forgets_bells_of_rings_that_are_not_enabled_looks_at_them_once_they_are() {
    let server = serve(Manners { forgets: true, ..GOOD });
    let mut driver = started(&server);
    driver.wait("both queues to be told of", |driver| driver.sent().contains(&0x42));
    driver.write(0x14, &[0]);
    drop(driver);
    let rung: Vec<_> = server.end().into_iter().map(|(request, _)| request).filter(|request| *request >= 1000).collect();
    assert_eq!(rung, [1000, 1001]);
}

#[test]
fn a_server_that_has_rings_hears_of_memory_that_came() {
    let server = serve(GOOD);
    let connection = server.meet(&folder()).unwrap();
    let mut memory = shared_memory();
    connection.memory_grew(&memory, || false);
    let remote = Remote::new("test", &folder(), Arc::clone(&connection)).unwrap();
    let mut driver = Driver::with_memory(remote, memory.clone());
    driver.set_up(u64::MAX);
    driver.wait("the server to have its rings", |driver| driver.sent().contains(&0x42));
    let file = tempfile::tempfile().unwrap();
    file.set_len(RAM as u64).unwrap();
    let region = MmapRegion::from_file(FileOffset::new(file, 0), RAM).unwrap();
    memory = memory.insert_region(Arc::new(GuestRegionMmap::new(region, GuestAddress(1 << 32)).unwrap())).unwrap();
    connection.memory_grew(&memory, || false);
    driver.write(0x14, &[0]);
    connection.memory_grew(&memory, || false);
    drop((driver, connection));
    let tables = server.end().into_iter().filter(|(request, _)| *request == 5);
    assert_eq!(tables.map(|(_, regions)| regions & 0xFF).collect::<Vec<_>>(), [1, 2], "regions of each table");
}

#[test]
fn case_g7_a_server_without_any_protocol_feature_serves_a_folder() {
    let server = serve(Manners { features: feature::VERSION_1, ..GOOD });
    let mut driver = started(&server);
    assert_eq!(driver.status(), 0x0F);
    let last = (12, 1);
    let mut requests: Vec<_> = server.requests.iter().take_while(|request| *request != last).collect();
    driver.write(0x14, &[0]);
    drop(driver);
    requests.extend(server.end());
    let requests: Vec<_> = requests.into_iter().map(|(request, _)| request).collect();
    assert!(!requests.contains(&18) && requests.contains(&11), "{requests:?}");
}

#[test]
fn features_of_rings_that_the_server_lacks_are_not_offered() {
    let server = serve(Manners { features: feature::VERSION_1 | PROTOCOL, ..GOOD });
    let remote = server.remote(&folder());
    assert_eq!(remote.transport_features(), feature::VERSION_1);
}

#[test]
fn case_g7_what_a_server_lacks_is_named() {
    let lacks = |manners: Manners, spec: RemoteSpec| {
        let server = serve(manners);
        let made = server.meet(&spec).map_err(|error| error.to_string());
        made.and_then(|server| Remote::new("dev0", &spec, server).map_err(|error| error.to_string())).err().unwrap()
    };
    let text = lacks(Manners { protocol: MQ, ..GOOD }, disk(1));
    assert!(text.contains("lacks the protocol feature CONFIG"), "{text}");
    let text = lacks(Manners { features: PROTOCOL, ..GOOD }, folder());
    assert!(text.contains("VIRTIO_F_VERSION_1"), "{text}");
    let text = lacks(Manners { queues: 2, ..GOOD }, disk(4));
    assert!(text.contains("has 2 queues") && text.contains("asked for: 4"), "{text}");
    assert!(lacks(GOOD, disk(2)).contains("VIRTIO_BLK_F_MQ"));
    assert!(lacks(GOOD, interface(4)).contains("VIRTIO_NET_F_MQ"));
}

#[test]
fn a_disk_shows_the_server_s_configuration() {
    let server = serve(Manners { features: GOOD.features | 1 << virtio_blk::VIRTIO_BLK_F_MQ, ..GOOD });
    let mut driver = Driver::new(server.remote(&disk(2)));
    assert_eq!((driver.config::<8>(0), driver.config::<2>(34)), ([7; 8], [2, 0]));
}

#[test]
fn a_disk_that_becomes_another_size_is_shown_so() {
    let server = serve(Manners { protocol: GOOD.protocol | BACKEND_REQ, changes: true, ..GOOD });
    let mut driver = started_as(&disk(1), &server);
    driver.wait("an interrupt for the configuration", |driver| driver.sent().contains(&0x40));
    assert_eq!(driver.config::<4>(0), [8; 4]);
    driver.write(0x14, &[0]);
    drop(driver);
    assert!(server.end().contains(&(16, MQ | REPLY_ACK | CONFIG | BACKEND_REQ)));
}

#[test]
fn an_interface_has_what_both_sides_can_and_the_queues_that_the_driver_asks_for() {
    let both = 1 << virtio_net::VIRTIO_NET_F_MQ | 1 << virtio_net::VIRTIO_NET_F_CSUM | 1 << virtio_net::VIRTIO_NET_F_GUEST_UFO;
    let server = serve(Manners { features: GOOD.features | both, ..GOOD });
    let mut driver = started_as(&interface(4), &server);
    assert_eq!((driver.config::<6>(0), driver.config::<4>(8)), ([2, 0, 0, 0, 0, 9], [2, 0, 0x28, 0x23]));
    driver.wait("the first pair to be in use", |driver| driver.sent().contains(&0x42));
    driver.put(DATA, &[4, 0, 2, 0]);
    driver.send(4, &[(DATA, 4, 0), (DATA + 64, 1, WRITE)]);
    assert_eq!((driver.answer(4).len, driver.bytes(DATA + 64, 1)), (1, vec![0]));
    driver.put(DATA, &[4, 0, 3, 0]);
    driver.send(4, &[(DATA, 4, 0), (DATA + 64, 1, WRITE)]);
    assert_eq!((driver.answer(4).len, driver.bytes(DATA + 64, 1)), (1, vec![1]), "there are not so many");
    driver.write(0x14, &[0]);
    drop(driver);
    let requests = server.end();
    let features = requests.iter().find(|(request, _)| *request == 2).unwrap().1;
    let taken = 1 << virtio_net::VIRTIO_NET_F_MQ | 1 << virtio_net::VIRTIO_NET_F_CSUM;
    assert_eq!(features, feature::TRANSPORT | PROTOCOL | taken, "what is between this process and the driver stays so");
    let enabled = requests.iter().filter(|(request, _)| *request == 18).map(|(_, value)| (value & 0xFF, value >> 32));
    let pairs = [(0, 1), (1, 1), (0, 1), (1, 1), (2, 1), (3, 1), (0, 0), (1, 0), (2, 0), (3, 0)];
    assert_eq!(enabled.collect::<Vec<_>>(), pairs);
}

#[test]
fn a_driver_without_several_queues_has_the_first_pair() {
    let server = serve(Manners { features: GOOD.features | 1 << virtio_net::VIRTIO_NET_F_MQ, ..GOOD });
    let mut driver = Driver::with_memory(server.remote(&interface(4)), shared_memory());
    driver.set_up(feature::TRANSPORT);
    driver.wait("both queues to be in use", |driver| driver.sent().contains(&0x42));
    driver.write(0x14, &[0]);
    drop(driver);
    let started: Vec<_> = server.end().into_iter().filter(|(request, _)| *request == 12).map(|(_, value)| value & 0xFF).collect();
    assert_eq!(started, [0, 1]);
}

#[test]
fn a_server_that_comes_back_serves_the_next_start() {
    let server = serve(Manners { dies_at: 18, ..GOOD });
    let mut driver = started_as(&disk(1), &server);
    driver.wait("the device to give up", Driver::gave_up);
    let Process { directory, thread, .. } = server;
    thread.join().unwrap();
    let server = serve_in(directory, GOOD);
    driver.write(0x14, &[0]);
    driver.sent();
    driver.set_up(u64::MAX);
    driver.wait("an interrupt", |driver| driver.sent().contains(&0x41));
    assert!(!driver.gave_up());
    driver.write(0x14, &[0]);
    drop(driver);
    server.end();
}

#[test]
fn one_that_comes_back_with_less_than_the_guest_was_told_of_is_refused() {
    let server = serve(Manners { features: GOOD.features | 1 << virtio_blk::VIRTIO_BLK_F_FLUSH, dies_at: 18, ..GOOD });
    let mut driver = started_as(&disk(1), &server);
    driver.wait("the device to give up", Driver::gave_up);
    let Process { directory, thread, .. } = server;
    thread.join().unwrap();
    let server = serve_in(directory, GOOD);
    driver.write(0x14, &[0]);
    driver.set_up(u64::MAX);
    driver.wait("the device to give up again", Driver::gave_up);
    drop(driver);
    assert!(server.end().iter().all(|(request, _)| *request != 5), "it is told of no memory");
}

#[test]
fn a_server_that_says_nothing_is_an_error_after_a_while() {
    let server = serve(Manners { silent: true, ..GOOD });
    let start = Instant::now();
    let error = server.connect(1).err().unwrap().to_string();
    assert!(error.contains("did not do what a vhost-user server does"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn nobody_at_the_socket_is_an_error_at_once() {
    let error = Connection::open(std::path::Path::new("/nonexistent/s"), 1).err().unwrap().to_string();
    assert!(error.contains("is its server running"), "{error}");
}

#[test]
fn a_server_that_dies_stops_the_device_and_nothing_else() {
    // At each request that starts a device, and once it runs.
    for dies_at in [2, 5, 9, 12, 18] {
        let server = serve(Manners { dies_at, ..GOOD });
        let mut driver = started(&server);
        driver.wait("the device to give up", Driver::gave_up);
        driver.write(0x14, &[0]);
        driver.set_up(u64::MAX);
        driver.wait("the device to give up again", Driver::gave_up);
    }
    let server = serve(Manners { dies_at: 11, ..GOOD });
    let mut driver = started(&server);
    driver.write(0x14, &[0]);
    assert_eq!(driver.status(), 0);
}

#[test]
fn private_memory_is_refused_by_name() {
    let server = serve(GOOD);
    let remote = server.meet(&folder()).unwrap();
    let mut driver = Driver::started(Remote::new("test", &folder(), remote.clone()).unwrap());
    driver.wait("the device to give up", Driver::gave_up);
    let memory = Memory::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM)]).unwrap());
    let error = remote
        .current()
        .start(&memory, Handed { features: feature::VERSION_1, rings: &[], calls: &[], enabled: &AtomicUsize::new(0) }, || false)
        .unwrap_err()
        .to_string();
    assert!(error.contains("--memory shared=on") || error.contains("vhost-user server"), "{error}");
}

#[test]
fn a_tag_that_does_not_fit_is_refused() {
    for tag in ["", "a tag that is longer than thirty-six bytes"] {
        let server = serve(GOOD);
        let spec = RemoteSpec { served: Served::Folder { tag: tag.into() }, ..folder() };
        let made = Remote::new("fs0", &spec, server.meet(&spec).unwrap());
        assert!(matches!(made, Err(RemoteError::Tag { .. })));
    }
}

#[test]
fn case_g8_the_connection_ends_with_the_device() {
    let server = serve(GOOD);
    let spec = RemoteSpec { served: Served::Folder { tag: String::new() }, ..folder() };
    assert!(Remote::new("fs0", &spec, server.meet(&spec).unwrap()).is_err());
    // It would wait for ever if the socket were still open.
    server.end();
}

#[test]
fn a_server_may_take_its_time_to_map_memory_as_long_as_the_device_is_wanted() {
    let several = GOOD.features | 1 << virtio_net::VIRTIO_NET_F_MQ;
    let server = serve(Manners { slow: Duration::from_millis(2500), features: several, ..GOOD });
    let mut driver = started_as(&interface(4), &server);
    driver.put(DATA, &[4, 0, 2, 0]);
    driver.send(4, &[(DATA, 4, 0), (DATA + 64, 1, WRITE)]);
    assert_eq!((driver.answer(4).len, driver.bytes(DATA + 64, 1)), (1, vec![0]), "what is asked meanwhile waits");
    assert!(!driver.gave_up());
    // The server hears of both pairs at once, or when it gets its rings.
    let last_is_enabled = |(request, value): (u32, u64)| request == 18 && value >> 32 == 1 && value & 0xFF == 3;
    while !last_is_enabled(server.requests.recv_timeout(Duration::from_secs(30)).unwrap()) {}
    driver.write(0x14, &[0]);
    drop(driver);
    server.end();
    let server = serve(Manners { slow: Duration::from_secs(6), ..GOOD });
    let mut driver = started(&server);
    let start = Instant::now();
    driver.write(0x14, &[0]);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}: a reset does not wait for it", start.elapsed());
    drop(driver);
    server.end();
}

/// Memory of `count` regions, all shared.
fn memory_in_parts(count: u64) -> GuestMemoryMmap {
    let parts = (0..count).map(|n| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(RAM as u64).unwrap();
        (GuestAddress(n << 32), RAM, Some(FileOffset::new(file, 0)))
    });
    GuestMemoryMmap::from_ranges_with_files(parts.collect::<Vec<_>>()).unwrap()
}

#[test]
fn a_server_with_slots_for_memory_hears_of_more_regions_than_one_message_has() {
    let server = serve(Manners { protocol: GOOD.protocol | SLOTS, queues: 10, ..GOOD });
    let connection = server.meet(&folder()).unwrap();
    assert_eq!(connection.most_regions(), 10);
    let remote = Remote::new("test", &folder(), Arc::clone(&connection)).unwrap();
    let mut driver = Driver::with_memory(remote, memory_in_parts(9));
    driver.set_up(u64::MAX);
    driver.wait("the server to have its rings", |driver| driver.sent().contains(&0x42));
    connection.memory_grew(&memory_in_parts(10), || false);
    connection.memory_grew(&memory_in_parts(11), || false);
    let told = connection.take_end("fs0").unwrap();
    assert!(
        told.contains("told of memory that came") && told.contains("at most 10 regions of memory, and there are 11"),
        "{told}"
    );
    driver.write(0x14, &[0]);
    drop((driver, connection));
    let told = server.end().into_iter().filter(|(request, _)| [5, 37].contains(request));
    assert_eq!(told.map(|(request, value)| (request, value & 0xFF)).collect::<Vec<_>>(), [(5, 8), (37, 0), (37, 0)]);
}

#[test]
fn a_server_that_says_that_it_maps_fewer_regions_than_there_are_is_refused_before_a_driver_starts_it() {
    let with = |protocol: u64, regions: u64| {
        let server = serve(Manners { protocol, queues: 4, ..GOOD });
        let connection = server.meet(&folder()).unwrap();
        let memory: Memory = Memory::new(memory_in_parts(regions));
        let made = RemoteFunction::new(
            "fs0",
            &folder(),
            Arc::clone(&connection),
            Seat { memory, msi: Arc::new(FakeMsi::default()), on: Attachment::RootBus },
        );
        let error = made.err().map(|error| error.to_string());
        drop(connection);
        server.end();
        error
    };
    assert_eq!(with(GOOD.protocol | SLOTS, 4), None);
    let error = with(GOOD.protocol | SLOTS, 5).unwrap();
    assert!(error.contains("fs0 maps at most 4 regions of memory, and the machine has 5"), "{error}");
    // One that cannot say it is tried with as many as a message holds.
    assert_eq!(with(GOOD.protocol, 9), None);
    assert!(with(GOOD.protocol, 33).unwrap().contains("at most 32 regions"));
}

#[test]
fn a_server_that_says_nothing_hears_of_memory_until_it_is_not_wanted() {
    let server = serve(Manners { slow: Duration::from_secs(60), ..GOOD });
    let connection = server.meet(&folder()).unwrap();
    let remote = Remote::new("test", &folder(), Arc::clone(&connection)).unwrap();
    let mut driver = Driver::with_memory(remote, shared_memory());
    driver.set_up(u64::MAX);
    driver.wait("the server to be told of memory", |_| server.requests.try_iter().any(|(request, _)| request == 5));
    let since = Instant::now();
    connection.memory_grew(&memory_in_parts(2), || true);
    assert!(since.elapsed() < Duration::from_secs(1), "{:?}", since.elapsed());
    driver.write(0x14, &[0]);
}
