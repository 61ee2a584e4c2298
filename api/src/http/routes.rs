//! Decides which endpoint a request is for.

use hyper::Method;

use super::reply::Reply;

/// What can be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Endpoint {
    Ping,
    VmmShutdown,
    Delete,
    Boot,
    Shutdown,
    Reboot,
    PowerButton,
    Pause,
    Resume,
    Info,
    Counters,
    Events,
    Document,
    Devices,
    /// What takes a body and adds no device.
    Change(Change),
    /// What adds a device.
    Add(Addition),
    /// Part of the dialect; Banyan cannot do it.
    Unsupported(&'static str),
}

/// What a body asks for beside devices that come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Create,
    Snapshot,
    Restore,
    Resize,
    RemoveDevice,
    InjectError,
}

/// What kind of device comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Addition {
    Device,
    Disk,
    Net,
    Fs,
    Vsock,
}

impl Endpoint {
    /// Whether it is of no use before there is a machine.
    pub(super) const fn needs_vm(self) -> bool {
        !matches!(
            self,
            Self::Ping
                | Self::VmmShutdown
                | Self::Change(Change::Create | Change::Restore)
                | Self::Events
                | Self::Document
                | Self::Unsupported(_)
        )
    }
}

const PREFIX: &str = "/api/v1/";

/// Name after the prefix, verb, endpoint.
const TABLE: &[(&str, Method, Endpoint)] = &[
    ("vmm.ping", Method::GET, Endpoint::Ping),
    ("vmm.shutdown", Method::PUT, Endpoint::VmmShutdown),
    ("vm.create", Method::PUT, Endpoint::Change(Change::Create)),
    ("vm.delete", Method::PUT, Endpoint::Delete),
    ("vm.boot", Method::PUT, Endpoint::Boot),
    ("vm.shutdown", Method::PUT, Endpoint::Shutdown),
    ("vm.reboot", Method::PUT, Endpoint::Reboot),
    ("vm.power-button", Method::PUT, Endpoint::PowerButton),
    ("vm.pause", Method::PUT, Endpoint::Pause),
    ("vm.resume", Method::PUT, Endpoint::Resume),
    ("vm.info", Method::GET, Endpoint::Info),
    ("vm.counters", Method::GET, Endpoint::Counters),
    ("vm.events", Method::GET, Endpoint::Events),
    ("openapi.yaml", Method::GET, Endpoint::Document),
    ("vm.devices", Method::GET, Endpoint::Devices),
    ("vm.resize", Method::PUT, Endpoint::Change(Change::Resize)),
    ("vm.add-device", Method::PUT, Endpoint::Add(Addition::Device)),
    ("vm.add-disk", Method::PUT, Endpoint::Add(Addition::Disk)),
    ("vm.add-net", Method::PUT, Endpoint::Add(Addition::Net)),
    ("vm.add-fs", Method::PUT, Endpoint::Add(Addition::Fs)),
    ("vm.add-vsock", Method::PUT, Endpoint::Add(Addition::Vsock)),
    ("vm.add-user-device", Method::PUT, Endpoint::Unsupported("vm.add-user-device")),
    ("vm.remove-device", Method::PUT, Endpoint::Change(Change::RemoveDevice)),
    ("vm.inject-error", Method::PUT, Endpoint::Change(Change::InjectError)),
    ("vm.snapshot", Method::PUT, Endpoint::Change(Change::Snapshot)),
    ("vm.restore", Method::PUT, Endpoint::Change(Change::Restore)),
    ("vm.coredump", Method::PUT, Endpoint::Unsupported("vm.coredump")),
    ("vm.add-pmem", Method::PUT, Endpoint::Unsupported("vm.add-pmem")),
    ("vm.add-vdpa", Method::PUT, Endpoint::Unsupported("vm.add-vdpa")),
    ("vm.add-generic-vhost-user", Method::PUT, Endpoint::Unsupported("vm.add-generic-vhost-user")),
    ("vm.balloon-stats", Method::GET, Endpoint::Unsupported("vm.balloon-stats")),
    ("vm.resize-disk", Method::PUT, Endpoint::Unsupported("vm.resize-disk")),
    ("vm.resize-zone", Method::PUT, Endpoint::Unsupported("vm.resize-zone")),
    ("vm.send-migration", Method::PUT, Endpoint::Unsupported("vm.send-migration")),
    ("vm.receive-migration", Method::PUT, Endpoint::Unsupported("vm.receive-migration")),
    ("vm.nmi", Method::PUT, Endpoint::Unsupported("vm.nmi")),
    // As some descriptions of the dialect spell it.
    ("vmm.nmi", Method::PUT, Endpoint::Unsupported("vmm.nmi")),
];

/// The endpoint, or what to answer instead.
pub(super) fn find(method: &Method, path: &str) -> Result<Endpoint, Reply> {
    let name = path.strip_prefix(PREFIX);
    let Some((path, verb, endpoint)) = TABLE.iter().find(|(known, ..)| name == Some(known)) else {
        return Err(Reply::NoPath(path.to_owned()));
    };
    if verb != method {
        let allow = if *verb == Method::GET { "GET" } else { "PUT" };
        return Err(Reply::WrongVerb { allow, path });
    }
    Ok(*endpoint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_known_by_its_whole_name_under_the_prefix() {
        assert!(matches!(find(&Method::GET, "/api/v1/vmm.ping"), Ok(Endpoint::Ping)));
        for path in
            ["/", "", "*", "/api/v1/", "/api/v1", "/vmm.ping", "/api/v2/vmm.ping", "/api/v1/vmm.ping/", "/api/v1/vm.Create"]
        {
            assert!(matches!(find(&Method::GET, path), Err(Reply::NoPath(_))), "{path}");
        }
    }

    #[test]
    fn the_document_describes_every_endpoint_and_nothing_else() {
        let document = include_str!("../../openapi.yaml");
        let paths = document.split_once("\npaths:\n").unwrap().1.split_once("\ncomponents:\n").unwrap().0;
        let mut described = Vec::new();
        let mut lines = paths.lines().peekable();
        while let Some(line) = lines.next() {
            if let Some(name) = line.strip_prefix("  /").and_then(|name| name.strip_suffix(':')) {
                described.push((name.to_owned(), lines.peek().unwrap().trim().trim_end_matches(':').to_ascii_uppercase()));
            }
        }
        described.sort();
        let mut known: Vec<_> = TABLE.iter().map(|(name, verb, _)| ((*name).to_owned(), verb.to_string())).collect();
        known.sort();
        assert_eq!(described, known);
    }

    #[test]
    fn a_wrong_verb_is_answered_with_the_right_one() {
        for (name, verb, endpoint) in TABLE {
            let path = format!("{PREFIX}{name}");
            assert!(matches!(find(verb, &path), Ok(found) if found == *endpoint));
            for wrong in [Method::POST, Method::HEAD, Method::DELETE, Method::OPTIONS] {
                let reply = find(&wrong, &path);
                assert!(matches!(reply, Err(Reply::WrongVerb { allow, .. }) if allow == verb.as_str()), "{wrong} {path}");
            }
        }
    }
}
