//! What a check comes to, as tables for a person and as JSON.

use std::fmt;

use serde::Serialize;

use super::reach::Verdict;
use crate::table::table;

/// How much a finding matters; worse ones last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Good to know, or not known.
    Note,
    /// It works, and not as well as it could.
    Warning,
    /// The guest cannot be started, or the devices not be used.
    Problem,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Problem => "problem",
        })
    }
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How much it matters.
    pub severity: Severity,
    /// What kind of thing it is: a word.
    pub topic: &'static str,
    /// What it is about: a device, a port, the host.
    pub about: String,
    /// What was found.
    pub text: String,
    /// What can be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Finding {
    /// Without a remedy.
    pub fn new(severity: Severity, topic: &'static str, about: impl fmt::Display, text: impl fmt::Display) -> Self {
        Self { severity, topic, about: about.to_string(), text: text.to_string(), remedy: None }
    }

    /// With something to do about it.
    #[must_use]
    pub fn remedy(self, remedy: Option<impl Into<String>>) -> Self {
        Self { remedy: remedy.map(Into::into), ..self }
    }
}

/// A device that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// Its address.
    pub at: String,
    /// What it is, in a word.
    pub what: String,
    /// Vendor and device.
    pub ids: String,
    /// Driver bound to it.
    pub driver: Option<String>,
    /// IOMMU group.
    pub group: Option<u32>,
    /// Memory node.
    pub node: Option<u32>,
}

/// Two devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pair {
    /// Name of one.
    pub a: String,
    /// Name of the other.
    pub b: String,
    /// Which way requests take.
    pub way: Verdict,
    /// Why.
    pub why: String,
    /// Ports between them, the nearest to `a` first, whose access control is not as recommended.
    pub ports: Vec<Port>,
}

/// A port whose access control is not as recommended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Port {
    /// Its address.
    pub at: String,
    /// Its control register; `None` where there is none or it could not be read.
    pub control: Option<u16>,
    /// What is wrong.
    pub fault: String,
    /// Bits that should be on and are off, or not there.
    pub off: Vec<String>,
    /// Bits that should be off and are on.
    pub on: Vec<String>,
}

/// All of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The devices, as they were given.
    pub devices: Vec<Device>,
    /// Each pair of those that exchange data.
    pub pairs: Vec<Pair>,
    /// What was found, by topic.
    pub findings: Vec<Finding>,
}

impl Report {
    /// The worst of it.
    #[must_use]
    pub fn severity(&self) -> Severity {
        let pairs = self.pairs.iter().map(|pair| match pair.way {
            Verdict::Direct => Severity::Ok,
            Verdict::RootComplex | Verdict::Unknown => Severity::Warning,
            Verdict::Impossible => Severity::Problem,
        });
        self.findings.iter().map(|finding| finding.severity).chain(pairs).max().unwrap_or(Severity::Ok)
    }

    /// As JSON, with `result`: ok, warning or problem.
    #[must_use]
    pub fn json(&self) -> String {
        let result = self.severity().max(Severity::Ok);
        let result = if result == Severity::Note { Severity::Ok } else { result };
        let value = serde_json::json!({
            "result": result,
            "devices": self.devices,
            "pairs": self.pairs,
            "findings": self.findings,
        });
        format!("{value:#}\n")
    }

    fn count(&self, severity: Severity) -> String {
        let count = self.findings.iter().filter(|finding| finding.severity == severity).count();
        format!("{count} {severity}{}", if count == 1 { "" } else { "s" })
    }
}

fn word(value: Option<impl fmt::Display>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = self.devices.iter().map(|device| {
            let Device { name, at, what, ids, .. } = device.clone();
            vec![name, at, what, ids, word(device.driver.as_ref()), word(device.group), word(device.node)]
        });
        writeln!(f, "{}", table(&["DEVICE", "ADDRESS", "WHAT", "IDS", "DRIVER", "GROUP", "NODE"], devices))?;
        if !self.pairs.is_empty() {
            let pairs =
                self.pairs.iter().map(|pair| vec![pair.a.clone(), pair.b.clone(), pair.way.to_string(), pair.why.clone()]);
            writeln!(f, "{}", table(&["FROM", "TO", "WAY", "WHY"], pairs))?;
        }
        for Finding { severity, topic, about, text, remedy } in &self.findings {
            let line = format!("{severity:<8} {topic:<8} {about}: {text}").replace(char::is_control, "?");
            writeln!(f, "{line}")?;
            if let Some(remedy) = remedy {
                writeln!(f, "{:17} to do: {}", "", remedy.replace(char::is_control, "?"))?;
            }
        }
        let ways = |way: Verdict| self.pairs.iter().filter(|pair| pair.way == way).count();
        let kinds = [Verdict::Direct, Verdict::RootComplex, Verdict::Unknown, Verdict::Impossible];
        let ways: Vec<String> =
            kinds.into_iter().filter(|way| ways(*way) > 0).map(|way| format!("{} {way}", ways(way))).collect();
        let ways = if ways.is_empty() { String::new() } else { format!("; ways: {}", ways.join(", ")) };
        writeln!(f, "\n{}, {}{ways}", self.count(Severity::Problem), self.count(Severity::Warning))
    }
}
