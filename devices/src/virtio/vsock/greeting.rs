//! How a client of the host says which port of the guest it wants: one line, `CONNECT <port>`.

use std::io;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// Longest line, its end included. The longest that makes sense has 19 bytes.
const LINE: usize = 32;

/// What a client said so far.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    /// Not a whole line.
    Unfinished,
    /// It wants this port. The line is taken off; what comes behind it is still there.
    Port(u32),
    /// Nothing that makes sense, or it is gone.
    Wrong,
}

/// Looks at what `client` has sent, without waiting.
pub(super) fn read(client: &UnixStream) -> Greeting {
    let mut line = [0; LINE];
    let seen = match recv(client, &mut line[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, seen @ 1..)) => seen,
        Err(Errno::AGAIN | Errno::INTR) => return Greeting::Unfinished,
        Ok(_) | Err(_) => return Greeting::Wrong,
    };
    let seen = line.get(..seen).unwrap_or_default();
    let Some(end) = seen.iter().position(|byte| *byte == b'\n') else {
        return if seen.len() < LINE { Greeting::Unfinished } else { Greeting::Wrong };
    };
    let Some(port) = seen.get(..end).and_then(port) else { return Greeting::Wrong };
    let mut taken = [0; LINE];
    match taken.get_mut(..=end).map(|taken| recv(client, taken, RecvFlags::DONTWAIT)) {
        Some(Ok((_, count))) if count == end + 1 => Greeting::Port(port),
        _ => Greeting::Wrong,
    }
}

/// The port in `CONNECT <port>`, the word in any case.
fn port(line: &[u8]) -> Option<u32> {
    let line = std::str::from_utf8(line).ok()?;
    let (word, port) = line.strip_suffix('\r').unwrap_or(line).split_once(' ')?;
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    if word.eq_ignore_ascii_case("connect") && digits { port.parse().ok() } else { None }
}

/// Tells the client that the guest took its connection: in a message of its own, since clients drop what comes with it.
pub(super) fn confirm(client: &UnixStream, host_port: u32) -> io::Result<()> {
    let line = format!("OK {host_port}\n");
    let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
    let sent = rustix::net::send(client, line.as_bytes(), flags)?;
    if sent == line.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn the_port_is_read_in_any_case_and_nothing_behind_the_line() {
        for line in ["CONNECT 1024\n", "connect 1024\n", "CoNnEcT 1024\r\n"] {
            let (mut client, mut served) = UnixStream::pair().unwrap();
            client.write_all(line.as_bytes()).unwrap();
            client.write_all(b"behind").unwrap();
            assert_eq!(read(&served), Greeting::Port(1024), "{line:?}");
            let mut behind = [0; 6];
            served.read_exact(&mut behind).unwrap();
            assert_eq!(&behind, b"behind");
        }
    }

    #[test]
    fn case_g5_part_of_a_line_waits_and_junk_is_wrong() {
        let (mut client, served) = UnixStream::pair().unwrap();
        assert_eq!(read(&served), Greeting::Unfinished);
        client.write_all(b"CONNECT 10").unwrap();
        assert_eq!(read(&served), Greeting::Unfinished);
        assert_eq!(read(&served), Greeting::Unfinished, "looking takes nothing");
        client.write_all(b"24\n").unwrap();
        assert_eq!(read(&served), Greeting::Port(1024));
        for junk in [
            "\n",
            "CONNECT\n",
            "CONNECT \n",
            "CONNECT x\n",
            "CONNECT -1\n",
            "CONNECT +1\n",
            "CONNECT 4294967296\n",
            "CONNECT 1 2\n",
            "DISCONNECT 1\n",
            "\u{e9}\n",
            "0123456789012345678901234567890123456789",
        ] {
            let (mut client, served) = UnixStream::pair().unwrap();
            client.write_all(junk.as_bytes()).unwrap();
            assert_eq!(read(&served), Greeting::Wrong, "{junk:?}");
        }
        let (client, served) = UnixStream::pair().unwrap();
        (&client).write_all(b"CONNECT 10").unwrap();
        drop(client);
        // The part stays readable; that nothing follows is told by the hang-up.
        assert_eq!(read(&served), Greeting::Unfinished);
        let (client, served) = UnixStream::pair().unwrap();
        drop(client);
        assert_eq!(read(&served), Greeting::Wrong);
    }
}
