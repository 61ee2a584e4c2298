//! What each request is answered in each state of the machine, and which state it leads to.

use tests::guest::image;
use tests::server::Server;

/// Requests that lead from no machine to each state.
const STATES: [(&str, &[&str]); 5] = [
    ("absent", &[]),
    ("created", &["vm.create"]),
    ("running", &["vm.create", "vm.boot"]),
    ("paused", &["vm.create", "vm.boot", "vm.pause"]),
    ("shut down", &["vm.create", "vm.boot", "vm.shutdown"]),
];

const NOWHERE: &str = "file:///nonexistent/folder";

/// A request, and for each state the answer with the phase that vm.info shows then.
type Row = (&'static str, &'static str, [(u16, &'static str); 5]);

#[rustfmt::skip]
const TABLE: [Row; 20] = [
    // Request, body: absent, created, running, paused, shut down.
    ("PUT vm.create", "", [(204, "created"), (405, "created"), (405, "running"), (405, "paused"), (405, "created")]),
    ("PUT vm.boot", "", [(404, ""), (204, "running"), (405, "running"), (204, "running"), (204, "running")]),
    ("PUT vm.pause", "", [(404, ""), (405, "created"), (204, "paused"), (405, "paused"), (405, "created")]),
    ("PUT vm.resume", "", [(404, ""), (405, "created"), (405, "running"), (204, "running"), (405, "created")]),
    ("PUT vm.shutdown", "", [(404, ""), (405, "created"), (204, "created"), (204, "created"), (405, "created")]),
    ("PUT vm.reboot", "", [(404, ""), (405, "created"), (204, "running"), (204, "running"), (405, "created")]),
    ("PUT vm.power-button", "", [(404, ""), (405, "created"), (204, "running"), (204, "paused"), (405, "created")]),
    ("PUT vm.delete", "", [(404, ""), (204, ""), (204, ""), (204, ""), (204, "")]),
    ("GET vm.info", "", [(404, ""), (200, "created"), (200, "running"), (200, "paused"), (200, "created")]),
    ("GET vm.counters", "", [(404, ""), (405, "created"), (200, "running"), (200, "paused"), (405, "created")]),
    ("GET vm.devices", "", [(404, ""), (405, "created"), (200, "running"), (200, "paused"), (405, "created")]),
    ("GET vmm.ping", "", [(200, ""), (200, "created"), (200, "running"), (200, "paused"), (200, "created")]),
    ("PUT vm.resize", r#"{"desired_vcpus":1}"#,
        [(404, ""), (405, "created"), (204, "running"), (204, "paused"), (405, "created")]),
    ("PUT vm.add-device", r#"{"banyan":"stub,id=a"}"#,
        [(404, ""), (204, "created"), (200, "running"), (200, "paused"), (204, "created")]),
    ("PUT vm.remove-device", r#"{"id":"nobody"}"#,
        [(404, ""), (404, "created"), (404, "running"), (404, "paused"), (404, "created")]),
    ("PUT vm.inject-error", r#"{"at":"nobody","error":"completion-timeout"}"#,
        [(404, ""), (405, "created"), (404, "running"), (404, "paused"), (405, "created")]),
    ("PUT vm.snapshot", r#"{"destination_url":"NOWHERE"}"#,
        [(404, ""), (405, "created"), (405, "running"), (400, "paused"), (405, "created")]),
    ("PUT vm.restore", r#"{"source_url":"NOWHERE"}"#,
        [(400, ""), (405, "created"), (405, "running"), (405, "paused"), (405, "created")]),
    ("PUT vm.add-user-device", r#"{"socket":"/s"}"#,
        [(400, ""), (400, "created"), (400, "running"), (400, "paused"), (400, "created")]),
    ("PUT vm.coredump", "", [(400, ""), (400, "created"), (400, "running"), (400, "paused"), (400, "created")]),
];

fn phase(server: &Server) -> String {
    let (status, info) = server.call("GET vm.info", "");
    if status == 404 {
        return String::new();
    }
    let phase = info.split_once(r#""phase":""#).and_then(|(_, rest)| rest.split('"').next());
    phase.unwrap_or_else(|| panic!("no phase: {info}")).to_owned()
}

#[test]
#[cfg_attr(without_kvm, ignore = "needs /dev/kvm")]
fn each_request_is_answered_by_the_state_that_the_machine_is_in() {
    let create = format!(r#"{{"payload":{{"kernel":"{}"}},"memory":{{"size":67108864}}}}"#, image("echo.elf"));
    let mut wrong = Vec::new();
    for (column, (state, way)) in STATES.iter().enumerate() {
        let new = || {
            let server = Server::empty();
            for step in *way {
                server.expect(&format!("PUT {step}"), if *step == "vm.create" { &create } else { "" }, 204);
            }
            server
        };
        let mut server = new();
        let before = phase(&server);
        for (what, body, answers) in &TABLE {
            let (status, after) = answers[column];
            let body = if *what == "PUT vm.create" { create.clone() } else { body.replace("NOWHERE", NOWHERE) };
            let (found, reply) = server.call(what, &body);
            let then = phase(&server);
            if (found, then.as_str()) != (status, after) {
                wrong.push(format!("{state}: {what}: {found} and {then}, not {status} and {after}: {reply}"));
            }
            // Whoever is refused is told why.
            if found >= 400 && !(reply.starts_with("[\"") && reply.len() > 20) {
                wrong.push(format!("{state}: {what}: {found} says {reply}"));
            }
            // What was refused has changed nothing.
            if found < 400 && (then != before || what.contains("reboot") || what.contains("add-device")) {
                server = new();
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
