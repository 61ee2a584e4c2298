//! Where does each request of a connection end, and which heads may be passed on to be read?
//!
//! hyper reads requests. What it would take otherwise than it must be is found here before: a head that says in two ways how long its
//! body is, or in one that is not understood, is refused, since whoever sent or forwarded it may have meant another end (RFC 9112
//! 6.3, 11.2). `Expect` is taken out, so that no interim reply (RFC 9110 10.1.1) is ever made: clients of this API read one reply for
//! each request, and those that would wait for an interim one send their body after a while. What no parser of heads takes is passed
//! on as it is, for hyper to say why.

use std::mem;

use thiserror::Error;

/// Bytes of a request's head.
pub(super) const HEAD: usize = 16 << 10;

/// Headers of a request.
const HEADERS: usize = 100;

/// The place in a connection's bytes.
#[derive(Debug)]
pub(super) struct Framing {
    place: Place,
    begun: usize,
}

#[derive(Debug)]
enum Place {
    /// In a head of which this has come; between two requests if that is nothing.
    Head(Vec<u8>),
    /// In a body, so many bytes before its end.
    Body(u64),
    /// In a body of chunks.
    Chunks(Chunks),
    /// Behind a head that cannot be read. Nothing more is.
    Over,
}

/// Where in a body of chunks (RFC 9112 7.1). Whether it is made as it should be, hyper says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chunks {
    /// In the line with a chunk's size: what its digits say, and whether more of them may come.
    Size(u64, bool),
    /// In a chunk, so many bytes before the end of the line that it ends with.
    Data(u64),
    /// Behind the last chunk, in a line of which nothing has come or something.
    Trailer { empty: bool },
}

/// How a body's end is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Length {
    Bytes(u64),
    Chunked,
}

impl Default for Framing {
    fn default() -> Self {
        Self { place: Place::Head(Vec::new()), begun: 0 }
    }
}

impl Framing {
    /// Takes `bytes` as they came, and appends to `out` what hyper may read: heads when they are complete, bodies as they come. After
    /// an error nothing more is passed on.
    pub(super) fn pass(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) -> Result<(), HeadError> {
        let begun = self.begun;
        while !bytes.is_empty() {
            let count = match &mut self.place {
                Place::Head(head) if head.is_empty() => {
                    let blank = bytes.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
                    bytes = bytes.get(blank..).unwrap_or_default();
                    if bytes.is_empty() {
                        break;
                    }
                    self.begun += 1;
                    self.head(bytes, out)?
                }
                Place::Head(_) => self.head(bytes, out)?,
                Place::Body(left) => {
                    let count = up_to(*left, bytes);
                    *left = left.saturating_sub(count as u64);
                    if *left == 0 {
                        self.place = Place::Head(Vec::new());
                    }
                    out.extend_from_slice(bytes.get(..count).unwrap_or_default());
                    count
                }
                Place::Chunks(chunks) => {
                    let (count, ended) = chunks.pass(bytes);
                    if ended {
                        self.place = Place::Head(Vec::new());
                    }
                    out.extend_from_slice(bytes.get(..count).unwrap_or_default());
                    count
                }
                Place::Over => break,
            };
            bytes = bytes.get(count..).unwrap_or_default();
        }
        // What is no HTTP may have no lines that would end.
        if let Place::Head(head) = &mut self.place
            && self.begun > begun
            && !head.is_empty()
            && let Err(error) = look(head, |_| ())
        {
            let head = mem::take(head);
            return self.unreadable(error, &head, out);
        }
        Ok(())
    }

    /// Goes on with a head, by a line at most. Returns how many of `bytes` were of it.
    fn head(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<usize, HeadError> {
        let Place::Head(head) = &mut self.place else { return Ok(0) };
        let count = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |end| end + 1);
        head.extend_from_slice(bytes.get(..count).unwrap_or_default());
        let complete = head.ends_with(b"\n\r\n") || head.ends_with(b"\n\n");
        let head = match (complete, head.len()) {
            (true, ..=HEAD) => mem::take(head),
            (false, ..HEAD) => return Ok(count),
            _ => return self.refuse(HeadError::TooLarge),
        };
        let read = look(&head, |request| {
            let expects = request.headers.iter().any(|header| header.name.eq_ignore_ascii_case(EXPECT));
            length(request).map(|length| (length, expects))
        });
        self.place = match read {
            Ok(Ok((length, expects))) => {
                if expects {
                    head.split_inclusive(|byte| *byte == b'\n').filter(|line| !is_expect(line)).for_each(|line| out.extend(line));
                } else {
                    out.extend(head);
                }
                match length {
                    Length::Bytes(0) => Place::Head(Vec::new()),
                    Length::Bytes(length) => Place::Body(length),
                    Length::Chunked => Place::Chunks(Chunks::START),
                }
            }
            Ok(Err(error)) => return self.refuse(error),
            Err(error) => return self.unreadable(error, &head, out).map(|()| count),
        };
        Ok(count)
    }

    /// Ends with a head that no parser takes.
    fn unreadable(&mut self, error: httparse::Error, head: &[u8], out: &mut Vec<u8>) -> Result<(), HeadError> {
        if error == httparse::Error::TooManyHeaders {
            return self.refuse(HeadError::TooLarge);
        }
        self.place = Place::Over;
        out.extend_from_slice(head);
        Ok(())
    }

    fn refuse<T>(&mut self, error: HeadError) -> Result<T, HeadError> {
        self.place = Place::Over;
        Err(error)
    }

    /// Whether part of a head has come that is not passed on yet.
    pub(super) fn is_within_head(&self) -> bool {
        matches!(&self.place, Place::Head(head) if !head.is_empty())
    }

    /// How many requests have begun since this was asked last.
    pub(super) fn take_begun(&mut self) -> usize {
        mem::take(&mut self.begun)
    }
}

impl Chunks {
    const START: Self = Self::Size(0, true);

    /// How many of `bytes` are of the body, and whether it ends with them.
    fn pass(&mut self, bytes: &[u8]) -> (usize, bool) {
        let mut rest = bytes;
        while let Some((byte, behind)) = rest.split_first() {
            let mut behind = behind;
            *self = match (*self, byte) {
                (Self::Data(left), _) => {
                    let count = up_to(left, rest);
                    behind = rest.get(count..).unwrap_or_default();
                    match left.saturating_sub(count as u64) {
                        0 => Self::START,
                        left => Self::Data(left),
                    }
                }
                (Self::Size(0, _), b'\n') => Self::Trailer { empty: true },
                // With the end of its line.
                (Self::Size(size, _), b'\n') => Self::Data(size.saturating_add(2)),
                (Self::Size(size, true), digit) if digit.is_ascii_hexdigit() => {
                    let digit = char::from(*digit).to_digit(16).unwrap_or_default();
                    Self::Size(size.saturating_mul(16).saturating_add(digit.into()), true)
                }
                (Self::Size(size, _), _) => Self::Size(size, false),
                (Self::Trailer { empty: true }, b'\n') => return (bytes.len() - behind.len(), true),
                (Self::Trailer { .. }, b'\n') => Self::Trailer { empty: true },
                (Self::Trailer { empty }, byte) => Self::Trailer { empty: empty && *byte == b'\r' },
            };
            rest = behind;
        }
        (bytes.len(), false)
    }
}

const EXPECT: &str = "Expect";

/// Whether a line of a head that can be read is this header: its name begins with the line and ends with a colon.
fn is_expect(line: &[u8]) -> bool {
    line.split(|byte| *byte == b':').next().is_some_and(|name| name.eq_ignore_ascii_case(EXPECT.as_bytes()))
}

/// As many of `bytes` as `left` allows.
fn up_to(left: u64, bytes: &[u8]) -> usize {
    usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len())
}

/// What `what` says of a head that begins with `bytes`, complete or not.
fn look<T>(bytes: &[u8], what: impl FnOnce(&httparse::Request<'_, '_>) -> T) -> Result<T, httparse::Error> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    request.parse(bytes)?;
    Ok(what(&request))
}

/// How long a request's body is (RFC 9112 6.3).
fn length(request: &httparse::Request<'_, '_>) -> Result<Length, HeadError> {
    let values = |name: &'static str| {
        let of_it = request.headers.iter().filter(move |header| header.name.eq_ignore_ascii_case(name));
        of_it.map(|header| header.value.trim_ascii())
    };
    let (mut lengths, mut encodings) = (values("Content-Length"), values("Transfer-Encoding"));
    match (lengths.next(), encodings.next()) {
        (None, None) => Ok(Length::Bytes(0)),
        (Some(_), Some(_)) => Err(HeadError::TwoLengths),
        (Some(length), None) => {
            let number = length.iter().all(u8::is_ascii_digit).then(|| str::from_utf8(length).ok()?.parse().ok()).flatten();
            number.filter(|_| lengths.all(|other| other == length)).map(Length::Bytes).ok_or(HeadError::Length)
        }
        (None, Some(encoding)) => {
            // HTTP/1.0 has none (RFC 9112 6.1).
            let understood = request.version == Some(1) && encoding.eq_ignore_ascii_case(b"chunked");
            if understood && encodings.next().is_none() { Ok(Length::Chunked) } else { Err(HeadError::Encoding) }
        }
    }
}

/// A head that is refused, though its parts can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(super) enum HeadError {
    /// Too many bytes or headers.
    #[error("it is too large: at most {HEAD} bytes and {HEADERS} headers")]
    TooLarge,
    /// No length, or several.
    #[error("content-length must be one decimal number below 2^64")]
    Length,
    /// A length and chunks.
    #[error("it has both content-length and transfer-encoding, which say different ends of the body: send one of them")]
    TwoLengths,
    /// A body in a form that is not understood.
    #[error("transfer-encoding must be `chunked` alone, and HTTP/1.1: send content-length")]
    Encoding,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What is passed on of `pieces`, how many requests begin, and why it ends.
    fn passed(pieces: &[&[u8]]) -> (String, usize, Option<HeadError>) {
        let (mut framing, mut out) = (Framing::default(), Vec::new());
        let ended = pieces.iter().find_map(|piece| framing.pass(piece, &mut out).err());
        (String::from_utf8(out).unwrap(), framing.take_begun(), ended)
    }

    fn head(headers: &str) -> String {
        format!("PUT /a HTTP/1.1\r\n{headers}\r\n")
    }

    #[test]
    fn a_body_s_length_is_said_in_one_way_that_is_understood() {
        use HeadError::{Encoding, Length, TwoLengths};
        for (headers, expected) in [
            ("Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", TwoLengths),
            ("Transfer-Encoding: chunked\r\ncontent-length: 2\r\n", TwoLengths),
            ("Content-Length: 0\r\nA: b\r\ntransfer-encoding: gzip\r\n", TwoLengths),
            ("Content-Length: x\r\nTransfer-Encoding: chunked\r\n", TwoLengths),
            ("Content-Length: 2\r\nContent-Length: 3\r\n", Length),
            ("Content-Length: 2\r\nContent-Length: 02\r\n", Length),
            ("Content-Length: 2, 2\r\n", Length),
            ("Content-Length: +2\r\n", Length),
            ("Content-Length: -2\r\n", Length),
            ("Content-Length: 0x2\r\n", Length),
            ("Content-Length: 2 2\r\n", Length),
            ("Content-Length:\r\n", Length),
            ("Content-Length: 18446744073709551616\r\n", Length),
            ("Transfer-Encoding: gzip, chunked\r\n", Encoding),
            ("Transfer-Encoding: chunked, gzip\r\n", Encoding),
            ("Transfer-Encoding: chunked, chunked\r\n", Encoding),
            ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", Encoding),
            ("Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n", Encoding),
            ("Transfer-Encoding: xchunked\r\n", Encoding),
            ("Transfer-Encoding: chunked;a=b\r\n", Encoding),
            ("Transfer-Encoding: \"chunked\"\r\n", Encoding),
            ("Transfer-Encoding:\r\n", Encoding),
        ] {
            assert_eq!(passed(&[head(headers).as_bytes()]), (String::new(), 1, Some(expected)), "{headers}");
        }
        let old = "PUT /a HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert_eq!(passed(&[old.as_bytes()]).2, Some(Encoding));
        for headers in
            ["", "Content-Length: 0\r\n", "CONTENT-LENGTH:\t12 \r\nContent-Length: 12\r\n", "Transfer-Encoding: Chunked\r\n"]
        {
            assert_eq!(passed(&[head(headers).as_bytes()]), (head(headers), 1, None), "{headers}");
        }
    }

    #[test]
    fn what_follows_a_head_that_is_refused_or_cannot_be_read_is_not_passed_on() {
        let good = head("");
        let refused = head("Content-Length: 0\r\nTransfer-Encoding: chunked\r\n");
        let all = format!("{good}{refused}{good}");
        assert_eq!(passed(&[all.as_bytes(), all.as_bytes()]), (good.clone(), 2, Some(HeadError::TwoLengths)));
        for bad in ["PRI * HTTP/2.0\r\n\r\n", "GET /a HTTP/1.1\r\nA B: c\r\n\r\n", "GET /a HTTP/1.1\r\nA: b\r\n C: d\r\n\r\n"] {
            let all = format!("{good}{bad}SM\r\n\r\n{good}");
            assert_eq!(passed(&[all.as_bytes(), all.as_bytes()]), (format!("{good}{bad}"), 2, None), "{bad}");
        }
        assert_eq!(passed(&[b"\x16\x03\x01 no line of HTTP", b"more"]).0, "\x16\x03\x01 no line of HTTP");
    }

    #[test]
    fn a_head_is_passed_on_up_to_its_limit() {
        let of = |length: usize| head(&format!("A: {}\r\n", "b".repeat(length - head("A: \r\n").len())));
        assert_eq!(passed(&[of(HEAD).as_bytes()]), (of(HEAD), 1, None));
        assert_eq!(passed(&[of(HEAD + 1).as_bytes()]).2, Some(HeadError::TooLarge));
        assert_eq!(passed(&[&b"GET /"[..], &[b'a'; HEAD]]).2, Some(HeadError::TooLarge), "it need not end");
        assert_eq!(passed(&[head(&"A: b\r\n".repeat(HEADERS)).as_bytes()]).2, None);
        for headers in [HEADERS + 1, 3000] {
            assert_eq!(passed(&[head(&"A: b\r\n".repeat(headers)).as_bytes()]).2, Some(HeadError::TooLarge));
        }
    }

    #[test]
    fn expect_is_taken_out_and_nothing_else() {
        let with = head("Host: a\r\nexpect:100-continue\r\nExpected: x\r\nA: Expect: b\r\nEXPECT: y\r\nContent-Length: 8\r\n");
        let without = head("Host: a\r\nExpected: x\r\nA: Expect: b\r\nContent-Length: 8\r\n");
        let body = "Expect: ";
        assert_eq!(passed(&[with.as_bytes(), body.as_bytes()]), (without + body, 1, None));
    }

    /// Requests of all forms, and whether nothing is to be changed in them.
    fn requests() -> impl Strategy<Value = Vec<String>> {
        let body = prop::sample::select(vec![
            "",
            "{}",
            "\r\n\r\n",
            "GET /b HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        ]);
        let chunk = (body.clone(), prop::sample::select(vec!["", ";a=b", " ;0=\"2\"", "\t"]))
            .prop_filter("the last chunk is empty", |(body, _)| !body.is_empty())
            .prop_map(|(body, extension)| format!("{:X}{extension}\r\n{body}\r\n", body.len()));
        let end = prop::sample::select(vec!["0\r\n\r\n", "000;a\r\n\r\n", "0\r\nA: b\r\nContent-Length: 9\r\n\r\n"]);
        let request = prop_oneof![
            Just(head("")),
            Just("GET /c HTTP/1.0\nA: b\n\n".to_owned()),
            body.prop_map(|body| head(&format!("Content-Length: {}\r\n", body.len())) + body),
            (prop::collection::vec(chunk, 0..4), end)
                .prop_map(|(chunks, end)| head("Transfer-Encoding: chunked\r\n") + &chunks.concat() + end),
        ];
        prop::collection::vec(request, 1..6)
    }

    proptest! {
        #[test]
        fn requests_are_passed_on_as_they_came_in_any_pieces(
            requests in requests(),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
            blank in prop::sample::select(vec!["", "\r\n", "\n\r\n"]),
        ) {
            let all = requests.iter().map(|request| format!("{blank}{request}")).collect::<String>();
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(all.len() + 1)).chain([0, all.len()]).collect();
            cuts.sort_unstable();
            let pieces: Vec<_> = cuts.windows(2).map(|cut| &all.as_bytes()[cut[0]..cut[1]]).collect();
            prop_assert_eq!(passed(&pieces), (requests.concat(), requests.len(), None));
        }

        #[test]
        fn any_bytes_are_passed_on_or_refused(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..40)) {
            let (mut framing, mut out) = (Framing::default(), Vec::new());
            for piece in &pieces {
                let _ = framing.pass(piece, &mut out);
            }
            prop_assert!(out.len() <= pieces.concat().len());
        }
    }
}
