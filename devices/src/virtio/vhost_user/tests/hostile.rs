//! Servers that answer nonsense, say more than they should, or use what they are given against this process.

use std::os::fd::AsFd;
use std::thread;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::process::Twist;
use super::*;

/// The longest that anybody may wait for the device, whatever its server does: a reset may come while it is handed its rings.
const LONGEST: Duration = Duration::from_secs(10);

/// What became of a server and of its device, from the meeting to the driver's reset.
#[derive(Debug)]
enum Fate {
    /// No device was made.
    Refused(String),
    /// What was told of it.
    Failed(String),
    Worked,
}

/// Meets the server of a disk, starts it, and resets it.
fn live(manners: Manners) -> Fate {
    let process = serve(manners);
    let met = process.meet(&disk(1)).map_err(|error| error.to_string());
    let made = met.and_then(|server| {
        let remote = Remote::new("test", &disk(1), server.clone()).map_err(|error| error.to_string())?;
        Ok((server, remote))
    });
    let (server, remote) = match made {
        Ok(made) => made,
        Err(error) => return Fate::Refused(error),
    };
    let mut driver = Driver::with_memory(remote, shared_memory());
    driver.set_up(u64::MAX);
    // Rings of the queue's bell reach it when it is enabled.
    let begun = Instant::now();
    while !driver.gave_up() && !driver.sent().contains(&0x41) && begun.elapsed() < Duration::from_millis(2500) {
        thread::sleep(Duration::from_millis(5));
    }
    driver.write(0x14, &[0]);
    assert!(begun.elapsed() < LONGEST, "{:?} for {manners:?}", begun.elapsed());
    let told = server.take_end("test");
    assert_eq!(server.take_end("test"), None, "an end is told once");
    told.map_or(Fate::Worked, Fate::Failed)
}

/// All at the same time: most of it is waiting.
fn lives(all: Vec<Manners>) -> Vec<(Manners, Fate)> {
    let lives: Vec<_> = all.into_iter().map(|manners| thread::spawn(move || (manners, live(manners)))).collect();
    lives.into_iter().map(|life| life.join().unwrap()).collect()
}

/// Requests that a server answers: at the meeting, as it is handed its rings, as it gives them back.
const ANSWERED: [u32; 13] = [1, 15, 17, 24, 36, 2, 5, 8, 9, 10, 12, 13, 11];
/// Those that it only acknowledges.
const ACKNOWLEDGED: [u32; 7] = [2, 5, 8, 9, 10, 12, 13];

fn twisted(requests: &[u32], twist: Twist) -> Vec<Manners> {
    requests.iter().map(|at| Manners { protocol: GOOD.protocol | SLOTS, twist: Some((*at, twist)), ..GOOD }).collect()
}

#[test]
fn an_answer_that_is_none_ends_the_conversation_and_is_told_once() {
    let twists = [Twist::Short, Twist::Long, Twist::Trailing, Twist::Huge, Twist::Other, Twist::NoReply, Twist::Version];
    let mut all: Vec<_> = twists.into_iter().flat_map(|twist| twisted(&ANSWERED, twist)).collect();
    all.extend(twisted(&ACKNOWLEDGED, Twist::Refuses));
    for (manners, fate) in lives(all) {
        match fate {
            Fate::Refused(why) => {
                assert!(why.contains("/s did not do what a vhost-user server does"), "{manners:?}: {why}");
            }
            Fate::Failed(told) => {
                assert!(told.starts_with("test: ") && told.contains("the device gives up"), "{manners:?}: {told}");
            }
            // What follows the last answer nobody reads.
            Fate::Worked => {
                assert!(matches!(manners.twist, Some((11, Twist::Trailing | Twist::Long))), "{manners:?}");
            }
        }
    }
}

#[test]
fn an_answer_that_is_late_is_waited_for() {
    for (manners, fate) in lives(twisted(&ANSWERED, Twist::Late)) {
        assert!(matches!(fate, Fate::Worked), "{manners:?}: {fate:?}");
    }
}

#[test]
fn descriptors_that_nobody_asked_for_harm_nobody() {
    for (manners, fate) in lives(twisted(&ANSWERED, Twist::Descriptors)) {
        if let Fate::Refused(why) | Fate::Failed(why) = fate {
            assert!(why.contains("/s did not do what") || why.contains("gives up"), "{manners:?}: {why}");
        }
    }
}

#[test]
fn a_server_that_offers_everything_is_taken_at_its_word_for_what_is_known_here() {
    let server = serve(Manners { features: u64::MAX, protocol: u64::MAX, queues: 0x8000, ..GOOD });
    let mut driver = started_as(&disk(1), &server);
    driver.wait("the first queue to be told of", |driver| driver.sent().contains(&0x41));
    driver.write(0x14, &[0]);
    drop(driver);
    let requests = server.end();
    let protocol = MQ | REPLY_ACK | CONFIG | BACKEND_REQ | SLOTS;
    assert!(requests.contains(&(16, protocol)), "{requests:?}");
    let taken = requests.iter().find(|(request, _)| *request == 2).unwrap().1;
    assert_eq!(taken & !(feature::TRANSPORT | PROTOCOL | disk(1).served.features()), 0, "{taken:#x}");
}

#[test]
fn a_server_of_no_queue_or_no_region_is_refused() {
    let refused = |manners| match live(manners) {
        Fate::Refused(why) => why,
        fate => panic!("{fate:?}"),
    };
    let why = refused(Manners { queues: 0, ..GOOD });
    assert!(why.contains("has 0 queues"), "{why}");
    let server = serve(Manners { queues: 0, protocol: CONFIG | SLOTS, ..GOOD });
    let (remote, msi) = (server.meet(&disk(1)).unwrap(), Arc::new(FakeMsi::default()));
    let seat = Seat { memory: Memory::new(shared_memory()), msi, on: Attachment::RootBus };
    let error = RemoteFunction::new("d", &disk(1), remote, seat).err().unwrap().to_string();
    assert!(error.contains("maps at most 0 regions of memory, and the machine has 1"), "{error}");
}

#[test]
fn bells_that_a_server_turns_against_this_process_make_nobody_wait() {
    for (manners, fate) in lives(vec![Manners { blocks: true, ..GOOD }; 4]) {
        assert!(matches!(fate, Fate::Worked), "{manners:?}: {fate:?}");
    }
}

#[test]
fn the_end_of_a_server_shows_before_and_while_a_driver_uses_the_device_and_is_told_once() {
    let readable = |server: &Server| {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::from_borrowed_fd(server.as_fd(), PollFlags::IN)], Some(&now)) == Ok(1)
    };
    let until_readable = |server: &Server| {
        let since = Instant::now();
        while !readable(server) {
            assert!(since.elapsed() < Duration::from_secs(30), "nothing shows");
            thread::sleep(Duration::from_millis(2));
        }
    };
    for dies_at in [24, 2, 5, 9, 12, 18, 11] {
        // At 24 it has no driver: it is asked for its configuration once more.
        let process = serve(Manners { dies_at: if dies_at == 24 { u32::MAX } else { dies_at }, ..GOOD });
        let server = process.meet(&folder()).unwrap();
        assert!(!readable(&server) && server.take_end("f").is_none());
        let mut driver = Driver::with_memory(Remote::new("f", &folder(), server.clone()).unwrap(), shared_memory());
        if dies_at == 24 {
            server.current().close();
        } else {
            driver.set_up(u64::MAX);
            if dies_at == 11 {
                driver.wait("both queues to be told of", |driver| driver.sent().contains(&0x42));
            } else {
                driver.wait("the device to give up", Driver::gave_up);
            }
            driver.write(0x14, &[0]);
        }
        until_readable(&server);
        let told = server.take_end("f").unwrap();
        assert!(told.starts_with("f: the server at ") && told.contains(" is gone"), "{told}");
        assert_eq!(told.contains("while it was to give its rings back"), dies_at == 11, "{told}");
        // Nobody listens there any more, which the driver finds out.
        driver.set_up(u64::MAX);
        driver.wait("the device to give up again", Driver::gave_up);
        assert!(!readable(&server) && server.take_end("f").is_none());
        process.thread.join().unwrap();
    }
}
