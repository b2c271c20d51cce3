//! The report on this machine, as a page and as JSON.

use super::{
    facts::{Facts, Finding, Gpu, Kind, gigabytes},
    probe::{PROBE_BYTES, Probe},
};
use aquifer_benches::console::{json, layout::wrap};
use aquifer_core::Bytes;
use aquifer_host::{
    region::PinnedBy,
    topology::{ThpMode, Topology},
};
use serde_json::{Value, json};

/// Columns of the page.
const WIDTH: usize = 80;
/// Columns before the text.
const INDENT: usize = 11;
/// The text in place of the fix if a warning has none.
const NOTHING: &str = "nothing to do";

/// The complete report on this machine.
#[derive(Debug)]
pub(crate) struct Diagnosis {
    pub(super) facts: Facts,
    pub(super) probes: Vec<Probe>,
    pub(super) findings: Vec<Finding>,
}

impl Diagnosis {
    /// Returns whether there is a warning.
    pub(crate) fn has_warnings(&self) -> bool {
        of(self, Kind::Warning).next().is_some()
    }

    /// Returns the page, without a newline after the last line.
    pub(crate) fn to_screen(&self) -> String {
        page(self)
    }

    /// Returns the texts of the page as one JSON object.
    pub(crate) fn to_json(&self) -> String {
        json(self)
    }
}

/// Returns what the driver and the kernel say, and the probes: each text under its label.
fn facts(diagnosis: &Diagnosis) -> Vec<(String, String)> {
    let mut facts = vec![("driver".to_owned(), driver(diagnosis))];
    let mut say = |label: &str, says: String| facts.push((label.to_owned(), says));
    match &diagnosis.facts.gpus {
        Ok(gpus) => gpus.iter().for_each(|gpu| say(&gpu.info.device.to_string(), device(gpu))),
        Err(_) => say(
            "devices",
            "none; a simulated NVIDIA H200 stands in for tests and replays".to_owned(),
        ),
    }
    match &diagnosis.facts.host {
        Ok(host) => self::host(host, &mut say),
        Err(e) => say("host", format!("unknown: {e}")),
    }
    for probe in &diagnosis.probes {
        say("probe", self::probe(probe));
    }
    facts
}

fn page(diagnosis: &Diagnosis) -> String {
    let mut page =
        Page { lines: vec!["aquifer doctor".to_owned(), String::new()], label: String::new() };
    for (label, says) in facts(diagnosis) {
        page.say(&label, &says);
    }
    page.lines.push(String::new());
    for finding in of(diagnosis, Kind::Gets) {
        page.say("you get", &finding.says);
    }
    for finding in of(diagnosis, Kind::Limit) {
        page.say("not more", &finding.says);
    }
    for (place, finding) in of(diagnosis, Kind::Warning).enumerate() {
        page.lines.push(String::new());
        page.say(&format!("warning {}", place + 1), &finding.says);
        page.say("", &finding.fix.as_ref().map_or(NOTHING.to_owned(), |fix| format!("fix: {fix}")));
    }
    if !diagnosis.has_warnings() {
        page.lines.push(String::new());
        page.say("warnings", "none");
    }
    page.lines.join("\n")
}

fn of(diagnosis: &Diagnosis, kind: Kind) -> impl Iterator<Item = &Finding> {
    diagnosis.findings.iter().filter(move |finding| finding.kind == kind)
}

struct Page {
    lines: Vec<String>,
    /// The label of the last line.
    label: String,
}

impl Page {
    /// Adds text under a label. A label that repeats the last one is left out.
    fn say(&mut self, label: &str, says: &str) {
        let repeated = self.label == label;
        if !label.is_empty() {
            self.label = label.to_owned();
        }
        let mut label = if repeated { "" } else { label };
        for line in wrap(says, WIDTH - INDENT) {
            self.lines.push(format!("{label:<INDENT$}{line}"));
            label = "";
        }
    }
}

fn driver(diagnosis: &Diagnosis) -> String {
    match (&diagnosis.facts.gpus, diagnosis.facts.version) {
        (Err(reason), _) => format!("not there: {reason}"),
        (Ok(_), Some(version)) => format!("there, CUDA {}.{}", version / 1000, version % 1000 / 10),
        (Ok(_), None) => "there, of a version it does not tell".to_owned(),
    }
}

fn device(gpu: &Gpu) -> String {
    let Gpu { info, memory, node, .. } = gpu;
    let (major, minor) = info.compute_capability;
    let mut parts = vec![format!("{}, compute capability {major}.{minor}", info.name)];
    parts.push(match memory {
        Some(m) => format!("{} of {} free", Bytes(m.free), Bytes(m.total)),
        None => format!("{} of memory", Bytes(info.memory)),
    });
    parts.push(match &info.pci_address {
        Some(address) => format!("at {address}"),
        None => "at an unknown PCI address".to_owned(),
    });
    parts.push(node.map_or("near no known node".to_owned(), |id| format!("near {id}")));
    parts.push(if info.virtual_memory {
        format!("virtual memory in handles of {}", Bytes(info.granularity))
    } else {
        "no virtual memory management".to_owned()
    });
    parts.push(
        if info.async_pools { "stream-ordered pools" } else { "no stream-ordered pools" }
            .to_owned(),
    );
    if !info.peers.is_empty() {
        let peers: Vec<_> = info.peers.iter().map(ToString::to_string).collect();
        parts.push(format!("kernels reach the memory of {}", peers.join(" and ")));
    }
    parts.join(", ")
}

fn host(host: &Topology, say: &mut impl FnMut(&str, String)) {
    if host.nodes().is_empty() {
        say("nodes", "none that are known".to_owned());
    }
    for node in host.nodes() {
        let ours = node.allowed_cpus.len();
        let cpus = match node.cpus.len() {
            0 => "no CPUs".to_owned(),
            all if all == ours => format!("CPUs {}", node.cpus),
            _ => format!(
                "CPUs {}, ours {}",
                node.cpus,
                if ours == 0 { "none".into() } else { node.allowed_cpus.to_string() }
            ),
        };
        let memory = match (node.memory, node.free) {
            (Some(all), Some(free)) => format!("{} of {} free", Bytes(free), Bytes(all)),
            (Some(all), None) => Bytes(all).to_string(),
            _ => "memory unknown".to_owned(),
        };
        let whose = if node.device_memory { "; a device's" } else { "" };
        say("nodes", format!("{}: {cpus}; {memory}{whose}", node.id));
    }
    say("pages", pages(host));
}

fn pages(host: &Topology) -> String {
    let huge = match host.thp() {
        Some(ThpMode::Always) => "everywhere",
        Some(ThpMode::Madvise) => "on request",
        Some(ThpMode::Never) => "off",
        None => "unknown",
    };
    format!("base {}; transparent huge pages {huge}", Bytes(host.page_size() as u64))
}

fn probe(probe: &Probe) -> String {
    let size = Bytes(PROBE_BYTES as u64);
    let made = match &probe.region {
        Ok(made) => made,
        Err(e) => return format!("{}, a region of {size} cannot be made: {e}", probe.target),
    };
    let pinned = if made.report.pinned_by == PinnedBy::Nobody { "not pinned" } else { "pinned" };
    let mut says = format!(
        "{}, a region of {size}: made at {}, {pinned}; filled at {}",
        probe.target,
        gigabytes(made.make),
        gigabytes(made.fill)
    );
    match &probe.link {
        None => {}
        Some(Err(e)) => says += &format!("; a copy failed: {e}"),
        Some(Ok(link)) => {
            says += &format!(
                "; to the device at {}, back at {}",
                gigabytes(link.up),
                gigabytes(link.down)
            );
        }
    }
    says
}

fn json(diagnosis: &Diagnosis) -> String {
    let gpus = &diagnosis.facts.gpus;
    let says = |kind: Kind| Value::Array(of(diagnosis, kind).map(|f| json!(f.says)).collect());
    let warnings = of(diagnosis, Kind::Warning)
        .map(|f| json!({ "says": f.says, "fix": f.fix.as_deref().unwrap_or(NOTHING) }));
    let facts = facts(diagnosis);
    let facts = facts.iter().map(|(about, says)| json!({ "about": about, "says": says }));
    json::object(&[
        (
            "driver",
            json!({
                "present": gpus.is_ok(),
                "reason": gpus.as_ref().err().map(ToString::to_string),
                "cuda_version": diagnosis.facts.version,
            }),
        ),
        ("facts", Value::Array(facts.collect())),
        ("gets", says(Kind::Gets)),
        ("not_more", says(Kind::Limit)),
        ("warnings", Value::Array(warnings.collect())),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_driver::{DeviceId, DeviceInfo};

    #[test]
    fn a_label_is_written_once_however_often_and_long_is_said_under_it() {
        let mut page = Page { lines: Vec::new(), label: String::new() };
        for says in ["a", &"long ".repeat(30), "c"] {
            page.say("not more", says);
        }
        page.say("warning 1", "d");
        page.say("", "e");
        let labels: Vec<_> =
            page.lines.iter().map(|line| line.get(..INDENT).unwrap().trim()).collect();
        assert_eq!(labels, ["not more", "", "", "", "", "warning 1", ""]);
    }

    #[test]
    fn a_device_tells_whose_memory_its_kernels_reach() {
        let mut info = DeviceInfo::new(DeviceId(0), "a GPU".to_owned(), 1 << 30);
        let gpu = |info: &DeviceInfo| Gpu {
            info: info.clone(),
            memory: None,
            node: None,
            memory_node: None,
            cap: None,
            transports: Vec::new(),
        };
        assert!(!device(&gpu(&info)).contains("reach"));
        info.peers = vec![DeviceId(1), DeviceId(3)];
        assert!(device(&gpu(&info)).ends_with("kernels reach the memory of device 1 and device 3"));
    }
}
