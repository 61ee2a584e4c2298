//! Turns a request into a command, waits for the core's answer, and turns that into a reply.

use hyper::Method;

use super::passed::Passed;
use super::reply::Reply;
use super::routes::{Addition, Change, Endpoint, find};
use crate::channel::Controller;
use crate::command::{Added, Answer, Command, Reply as To};
use crate::config::VmConfig;
use crate::dialect::{self, Notes};
use crate::error::{ApiError, ErrorKind};
use crate::events::Event;
use crate::info::Published;

/// The description of the API, as it is served.
pub const DOCUMENT: &str = include_str!("../../openapi.yaml");

/// What requests are served from. Shared by all connections.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) controller: Controller,
    pub(super) published: Published,
    /// What vm.create cannot say.
    pub(super) base: VmConfig,
    pub(super) notes: Notes,
}

/// A request, complete.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) method: Method,
    pub(super) path: String,
    pub(super) body: Vec<u8>,
    pub(super) descriptors: Passed,
}

impl Service {
    /// Serves one request. Descriptors that nobody took are closed.
    pub(super) async fn serve(&self, request: Request) -> Reply {
        match find(&request.method, &request.path) {
            Ok(endpoint) => self.call(endpoint, &request.body, request.descriptors).await.unwrap_or_else(Reply::Error),
            Err(reply) => reply,
        }
    }

    async fn call(&self, endpoint: Endpoint, body: &[u8], descriptors: Passed) -> Result<Reply, ApiError> {
        let info = self.published.get();
        if endpoint.needs_vm() && info.is_none() {
            return Err(ApiError::no_vm());
        }
        Ok(match endpoint {
            Endpoint::Ping => dialect::ping().into(),
            Endpoint::Info => {
                let info = info.ok_or_else(ApiError::no_vm)?;
                dialect::vm_info(&info).into()
            }
            Endpoint::Document => Reply::Document(DOCUMENT),
            Endpoint::Events => self.events(),
            Endpoint::Unsupported(name) => return Err(ApiError::unsupported(name)),
            Endpoint::Delete => self.end(|reply| Command::Delete { reply }).await?.into(),
            Endpoint::Boot => self.ask(|reply| Command::Boot { reply }).await?.into(),
            Endpoint::Shutdown => self.end(|reply| Command::Shutdown { reply }).await?.into(),
            Endpoint::Reboot => self.ask(|reply| Command::Reboot { reply }).await?.into(),
            Endpoint::PowerButton => self.ask(|reply| Command::PowerButton { reply }).await?.into(),
            Endpoint::Pause => self.ask(|reply| Command::Pause { reply }).await?.into(),
            Endpoint::Resume => self.ask(|reply| Command::Resume { reply }).await?.into(),
            Endpoint::VmmShutdown => self.end(|reply| Command::VmmShutdown { reply }).await?.into(),
            Endpoint::Counters => dialect::counters(&self.ask(|reply| Command::Counters { reply }).await?).into(),
            Endpoint::Devices => dialect::listing(&self.ask(|reply| Command::ListDevices { reply }).await?).into(),
            Endpoint::Change(change) => self.change(change, body).await?,
            Endpoint::Add(addition) => {
                let (command, answer) = self.addition(addition, body, descriptors)?;
                self.controller.send(command);
                answer.await?.map_or(Reply::Done, |device| dialect::added(&device).into())
            }
        })
    }

    /// Calls what takes a body and adds no device.
    async fn change(&self, change: Change, body: &[u8]) -> Result<Reply, ApiError> {
        let notes = &self.notes;
        match change {
            Change::Create => {
                let config = Box::new(dialect::create(body, &self.base, notes)?);
                self.ask(|reply| Command::Create { config, reply }).await?;
            }
            Change::Snapshot => {
                let to = dialect::snapshot(body, notes)?;
                self.ask(|reply| Command::Snapshot { to, reply }).await?;
            }
            Change::Restore => {
                let dialect::Restore { from, prefault, resume } = dialect::restore(body, notes)?;
                self.ask(|reply| Command::Restore { from, prefault, reply }).await?;
                if resume {
                    self.ask(|reply| Command::Resume { reply }).await?;
                }
            }
            Change::Resize => {
                let to = dialect::resize(body, notes)?;
                self.ask(|reply| Command::Resize { to, reply }).await?;
            }
            Change::RemoveDevice => {
                let id = dialect::remove_device(body, notes)?;
                self.ask(|reply| Command::RemoveDevice { id, reply }).await?;
            }
            Change::InjectError => {
                let (at, error) = dialect::inject_error(body, notes)?;
                let injection = self.ask(|reply| Command::InjectError { at, error, reply }).await?;
                return Ok(dialect::injection(&injection).into());
            }
        }
        Ok(Reply::Done)
    }

    /// What happens from now on, after what holds at this moment.
    fn events(&self) -> Reply {
        // In this order: what comes in between is told twice rather than not at all.
        let listener = self.published.events().listen();
        let info = self.published.get();
        let phase = info.as_ref().map_or_else(|| "absent".to_owned(), |info| info.phase.to_string());
        let mut first = vec![Event::Phase(phase).json()];
        first.extend(info.and_then(|info| info.progress).map(|progress| Event::Progress(progress).json()));
        Reply::Events(first, listener)
    }

    /// The command that adds what `body` describes.
    fn addition(&self, addition: Addition, body: &[u8], descriptors: Passed) -> Result<(Command, Answer<Added>), ApiError> {
        let notes = &self.notes;
        let (reply, answer) = To::new();
        let command = match addition {
            Addition::Disk => Command::AddDisk { config: Box::new(dialect::add_disk(body, notes)?), reply },
            Addition::Fs => Command::AddFs { config: Box::new(dialect::add_fs(body, notes)?), reply },
            Addition::Vsock => Command::AddVsock { config: Box::new(dialect::add_vsock(body, notes)?), reply },
            Addition::Net => {
                let config = Box::new(dialect::add_net(body, descriptors.len(), notes)?);
                Command::AddNet { config, taps: descriptors.take(), reply }
            }
            Addition::Device => Command::AddDevice { functions: dialect::add_device(body, notes)?, reply },
        };
        Ok((command, answer))
    }

    /// Sends a command that ends the guest or the process. The end is its answer, if it comes first.
    async fn end(&self, command: impl FnOnce(To<()>) -> Command) -> Result<(), ApiError> {
        let (reply, answer) = To::new();
        self.controller.send(command(reply));
        answer.or_end().await
    }

    async fn ask<T>(&self, command: impl FnOnce(To<T>) -> Command) -> Result<T, ApiError> {
        let (reply, answer) = To::new();
        self.controller.send(command(reply));
        answer.await
    }
}

/// More descriptors than a request may bring, or than all that are not served yet may.
pub(super) fn too_many_descriptors(most: usize, under_way: usize) -> Reply {
    let what =
        format!("more than {most} descriptors came with one request, or more than {under_way} with all that are not served yet");
    Reply::Error(ApiError::new(ErrorKind::BadRequest, what))
}
