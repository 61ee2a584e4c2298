//! Decides which connections are served, for how long, and how they end.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use http_body_util::{BodyExt, Limited};
use hyper::Version;
use hyper::body::{Body as _, Incoming as IncomingBody};
use hyper::header::CONNECTION;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use thiserror::Error;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, oneshot};
use tokio::task::LocalSet;
use tokio::time::{Instant, sleep, timeout};

use super::framing::HEAD;
use super::handle::{Request, Service, too_many_descriptors};
use super::passed::{MOST_UNDER_WAY, Passed, UnderWay};
use super::reply::{Reply, unread};
use super::socket::{ListenError, Listening};
use super::transport::{Incoming, MAX_DESCRIPTORS, Owed, Transport};
use crate::channel::Controller;
use crate::config::VmConfig;
use crate::dialect::Notes;
use crate::error::{ApiError, ErrorKind};
use crate::info::Published;

/// What a client may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a request's body.
    pub body: usize,
    /// Time from a request's first byte to its last. Between requests there is no limit.
    pub unfinished: Duration,
    /// Connections. Beyond that, new ones wait until one ends; those that have been silent since they came make way.
    pub connections: usize,
}

impl Default for Limits {
    /// 4 MiB, 30 s, 256 connections.
    fn default() -> Self {
        Self { body: 4 << 20, unfinished: Duration::from_secs(30), connections: 256 }
    }
}

/// Descriptors that have to be left: some connections, and what is opened for one call.
const SPARE: usize = 4;

/// How long a connection may say nothing at first before it makes way for one that waits.
const FIRST_WORD: Duration = Duration::from_millis(250);

/// How long what a client still sends is read and thrown away after its request was refused. A connection that is closed while
/// something is unread is reset, and its client may not see the reply.
const LINGER: Duration = Duration::from_secs(1);

/// How much of it is, in bytes: eight times what a request may have at most. Nobody is read for as long as it likes to send.
const LINGER_MOST: usize = 32 << 20;

/// How long accepting rests when the process has no descriptors left.
const PAUSE: Duration = Duration::from_millis(50);

/// The thread that serves the API. Dropped without [`Server::close`] it ends without a wait for replies under way.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    close: Option<oneshot::Sender<Duration>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens at `path` and serves from `published` and by way of `controller`. `base` is what vm.create cannot say.
    /// When it returns, clients can connect.
    pub fn start(
        path: &Path,
        controller: Controller,
        published: Published,
        base: VmConfig,
        limits: Limits,
    ) -> Result<Self, ServeError> {
        let listening = Listening::at(path)?;
        let service = Service { controller, published, base, notes: Notes::default() };
        let (close, closed) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
        let runtime = runtime.map_err(ServeError::Start)?;
        let listener = {
            let _context = runtime.enter();
            listening.listener().and_then(UnixListener::from_std).map_err(ServeError::Start)?
        };
        // Who cannot accept a connection would never answer.
        let spare: io::Result<Vec<_>> = (0..SPARE).map(|_| listener.as_fd().try_clone_to_owned()).collect();
        spare.map_err(ServeError::Descriptors)?;
        let run = move || {
            let serving = Serving::new(service, limits);
            let local = LocalSet::new();
            local.block_on(&runtime, serving.run(listener, closed));
            // Removes the file, after the last client has its reply.
            drop(listening);
        };
        let thread = thread::Builder::new().name("api".to_owned()).spawn(run).map_err(ServeError::Start)?;
        Ok(Self { path: path.to_owned(), close: Some(close), thread: Some(thread) })
    }

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Ends: accepts no more connections, sends the replies to all that was asked, closes the connections and removes the
    /// socket. Waits for clients that do not read for `at_most`. Drop the [`crate::channel::Inbox`] and the replies that are
    /// still open first: that answers them.
    pub fn close(mut self, at_most: Duration) {
        self.end(at_most);
    }

    fn end(&mut self, at_most: Duration) {
        if let Some(close) = self.close.take() {
            let _ = close.send(at_most);
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the API's thread failed");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

struct Serving {
    service: Service,
    limits: Limits,
    closing: Cell<bool>,
    /// Woken when a connection ends, and for every one when the server does.
    changed: Notify,
    connections: RefCell<Vec<Rc<Connection>>>,
    /// Descriptors that came with requests.
    under_way: UnderWay,
}

struct Connection {
    incoming: Rc<Incoming>,
    since: Instant,
    /// It is to end: at once, or after the reply under way.
    end: Notify,
    leave: Cell<Leave>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leave {
    No,
    AfterReply,
    Now,
}

impl Connection {
    fn leave(&self, how: Leave) {
        self.leave.set(how);
        self.end.notify_one();
    }
}

impl Serving {
    fn new(service: Service, limits: Limits) -> Rc<Self> {
        let (closing, changed, connections) = (Cell::new(false), Notify::new(), RefCell::default());
        Rc::new(Self { service, limits, closing, changed, connections, under_way: UnderWay::default() })
    }

    async fn run(self: Rc<Self>, listener: UnixListener, mut closed: oneshot::Receiver<Duration>) {
        let at_most = {
            let mut accepting = pin!(self.clone().accept(listener));
            poll_fn(|context| {
                if let Poll::Ready(at_most) = std::pin::Pin::new(&mut closed).poll(context) {
                    return Poll::Ready(at_most.unwrap_or_default());
                }
                accepting.as_mut().poll(context).map(|never| match never {})
            })
            .await
        };
        self.closing.set(true);
        self.service.published.events().close();
        for connection in self.connections.borrow().iter() {
            connection.leave(Leave::AfterReply);
        }
        let all_gone = async {
            while !self.connections.borrow().is_empty() {
                self.changed.notified().await;
            }
        };
        if timeout(at_most, all_gone).await.is_err() {
            log::warn!("a client of the API did not read its reply");
        }
    }

    async fn accept(self: Rc<Self>, listener: UnixListener) -> Infallible {
        let mut failing = false;
        loop {
            let door = self.service.published.door();
            match poll_fn(|context| door.pass(context, |context| listener.poll_accept(context))).await {
                Ok((stream, _)) => {
                    failing = false;
                    self.room().await;
                    let connection = Rc::new(Connection {
                        incoming: Incoming::new(self.limits.unfinished, self.under_way.clone()),
                        since: Instant::now(),
                        end: Notify::new(),
                        leave: Cell::new(Leave::No),
                    });
                    self.connections.borrow_mut().push(connection.clone());
                    tokio::task::spawn_local(self.clone().serve(stream, connection));
                }
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        log::warn!("the API cannot accept connections: {error}");
                    }
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// Ready when one more connection can be served.
    async fn room(&self) {
        while self.connections.borrow().len() >= self.limits.connections {
            match self.make_room() {
                // Woken in time or not: what is then will be looked at.
                Some(wait) => drop(timeout(wait, self.changed.notified()).await),
                None => self.changed.notified().await,
            }
        }
    }

    /// Ends the oldest connection that never said a word, if it had the time to. Otherwise says how long it still has; `None`
    /// if all have said something.
    fn make_room(&self) -> Option<Duration> {
        let connections = self.connections.borrow();
        let silent = connections.iter().find(|connection| !connection.incoming.spoke())?;
        let left = FIRST_WORD.saturating_sub(silent.since.elapsed());
        if left.is_zero() {
            silent.leave(Leave::Now);
            return Some(FIRST_WORD);
        }
        Some(left)
    }

    async fn serve(self: Rc<Self>, stream: UnixStream, connection: Rc<Connection>) {
        let stream = Rc::new(stream);
        let transport = Transport::new(stream.clone(), connection.incoming.clone());
        let answer = service_fn(|request: hyper::Request<IncomingBody>| {
            let version = request.version();
            let (serving, incoming) = (self.clone(), connection.incoming.clone());
            let owed = Owed::to(incoming.clone());
            // A request that is complete is carried out, even if its client leaves before it is answered.
            let answer = tokio::task::spawn_local(async move { serving.answer(request, incoming).await });
            let server = self.clone();
            async move {
                let (reply, close) = answer.await.map_err(io::Error::other)?;
                // Looked at in the step in which hyper takes the reply, so that its header says what will happen.
                let close = close || server.closing.get();
                let mut response = reply.response(close).map(|body| body.owed(owed));
                // Where it is another one than the request's, hyper says `keep-alive` beside `close` to an HTTP/1.0 client.
                *response.version_mut() = version;
                Ok::<_, io::Error>(response)
            }
        });
        let ended = {
            let http = http1::Builder::new()
                .title_case_headers(true)
                .auto_date_header(false)
                .keep_alive(true)
                .max_buf_size(HEAD)
                .serve_connection(transport, answer);
            let mut http = pin!(http);
            let mut leaving = pin!(connection.end.notified());
            let mut told = false;
            let done = poll_fn(|context| {
                if !told && leaving.as_mut().poll(context).is_ready() {
                    told = true;
                    if connection.leave.get() == Leave::Now {
                        return Poll::Ready(Ok(()));
                    }
                    http.as_mut().graceful_shutdown();
                }
                http.as_mut().poll(context)
            });
            done.await.inspect_err(|error| log::debug!("a connection to the API ends: {error}"))
        };
        if connection.incoming.lingers() && connection.leave.get() == Leave::No {
            let error = ended.err().filter(|_| connection.incoming.is_unread());
            let why = error.map(|error| connection.incoming.refused().map_or_else(|| error.to_string(), |why| why.to_string()));
            let mut parted = pin!(timeout(LINGER, part(&stream, why)));
            let mut leaving = pin!(connection.end.notified());
            poll_fn(|context| {
                let done = parted.as_mut().poll(context).is_ready() || leaving.as_mut().poll(context).is_ready();
                if done { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        }
        self.connections.borrow_mut().retain(|other| !Rc::ptr_eq(other, &connection));
        self.changed.notify_one();
    }

    /// The reply to a request, and whether it is the last one of its connection.
    async fn answer(&self, request: hyper::Request<IncomingBody>, incoming: Rc<Incoming>) -> (Reply, bool) {
        incoming.begun();
        let (head, body) = request.into_parts();
        let close = wants_close(&head);
        match self.read(body, &incoming).await {
            Ok((body, descriptors)) => {
                // That of CONNECT has an authority alone (RFC 9110 9.3.6).
                let path =
                    Some(head.uri.path()).filter(|path| !path.is_empty()).map_or_else(|| head.uri.to_string(), str::to_owned);
                let request = Request { method: head.method, path, body, descriptors };
                let reply = self.service.serve(request).await;
                // An older client knows that a stream has ended by the connection's end.
                let close = close || head.version == Version::HTTP_10 && matches!(reply, Reply::Events(..));
                (reply, close)
            }
            Err(refusal) => (refusal.reply, close || refusal.close),
        }
    }

    /// The whole body, with its descriptors.
    async fn read(&self, body: IncomingBody, incoming: &Incoming) -> Result<(Vec<u8>, Passed), Refusal> {
        let most = self.limits.body;
        let too_long = || Refusal::closing(format!("the body is longer than {most} bytes"));
        if body.size_hint().lower() > most.try_into().unwrap_or(u64::MAX) {
            incoming.complete();
            incoming.linger();
            return Err(too_long());
        }
        let collected = Limited::new(body, most).collect().await;
        let descriptors = incoming.complete();
        match (collected, descriptors) {
            (Ok(body), Some(descriptors)) => Ok((body.to_bytes().into(), descriptors)),
            (Ok(_), None) => Err(Refusal { reply: too_many_descriptors(MAX_DESCRIPTORS, MOST_UNDER_WAY), close: false }),
            (Err(error), _) if error.is::<http_body_util::LengthLimitError>() => {
                incoming.linger();
                Err(too_long())
            }
            (Err(_), _) => {
                let limit = self.limits.unfinished.as_secs_f32();
                Err(Refusal::closing(format!("the body is broken off, or was not complete within {limit} s")))
            }
        }
    }
}

struct Refusal {
    reply: Reply,
    close: bool,
}

impl Refusal {
    fn closing(what: String) -> Self {
        Self { reply: Reply::Error(ApiError::new(ErrorKind::BadRequest, what)), close: true }
    }
}

/// The end of a connection whose client may still be sending: the reply, if a head cannot be read and this is `why`, and what
/// comes until the client ends its side, too.
async fn part(stream: &UnixStream, why: Option<String>) {
    if let Some(why) = why {
        refuse_unread(stream, why).await;
    }
    drain(stream).await;
}

/// Answers a request of which not even the head can be read.
async fn refuse_unread(stream: &UnixStream, why: String) {
    let reply = ApiError::new(ErrorKind::BadRequest, why).within("the head of the request cannot be read");
    let reply = unread(&reply);
    let mut rest = reply.as_slice();
    while !rest.is_empty() && stream.writable().await.is_ok() {
        match stream.try_write(rest) {
            Ok(count) => rest = rest.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

/// Says that nothing more is said, and reads what the client sends until it ends or has sent [`LINGER_MOST`].
async fn drain(stream: &UnixStream) {
    // A client that is gone has nothing to hear.
    let _ = rustix::net::shutdown(stream, rustix::net::Shutdown::Write);
    let (mut buffer, mut left) = ([0; 8192], LINGER_MOST);
    while left > 0 && stream.readable().await.is_ok() {
        match stream.try_read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => {
                left = left.saturating_sub(count);
                tokio::task::yield_now().await;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

/// Whether the client does not go on with this connection (RFC 9112, 9.3).
fn wants_close(head: &hyper::http::request::Parts) -> bool {
    let values = head.headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let options: Vec<_> = values.flat_map(|value| value.split(',')).map(str::trim).collect();
    let has = |wanted: &str| options.iter().any(|option| option.eq_ignore_ascii_case(wanted));
    has("close") || head.version == Version::HTTP_10 && !has("keep-alive")
}

/// An API that cannot be served.
#[derive(Debug, Error)]
pub enum ServeError {
    /// Not at this path.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// None left for clients.
    #[error("no descriptor is left for clients of the API: raise the limit of open files (ulimit -n)")]
    Descriptors(#[source] io::Error),
    /// Thread or event queue.
    #[error("cannot start the thread that serves the API")]
    Start(#[source] io::Error),
}
