//! The report on this machine, as a page and as JSON.

use super::{
    facts::{Facts, Finding, Gpu, Kind, gigabytes},
    probe::{PROBE_BYTES, Probe, Target},
    transports::TransportTrial,
};
use crate::ledgers::{self, SharedMemory};
use aquifer_benches::console::{figures::Count, json, layout::wrap};
use aquifer_core::Bytes;
use aquifer_host::{
    region::PinnedBy,
    topology::{HugePool, ThpMode, Topology},
};
use aquifer_status::ledger::LedgerError;
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
    /// The memories that processes of this user share.
    pub(super) shared: Result<Vec<SharedMemory>, LedgerError>,
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

    /// Returns everything as one JSON object. Sizes are in bytes, rates in bytes per second.
    pub(crate) fn to_json(&self) -> String {
        json(self)
    }
}

fn page(diagnosis: &Diagnosis) -> String {
    let mut page =
        Page { lines: vec!["aquifer doctor".to_owned(), String::new()], label: String::new() };
    page.say("driver", &driver(diagnosis));
    match &diagnosis.facts.gpus {
        Ok(gpus) => {
            gpus.iter().for_each(|gpu| page.say(&gpu.info.device.to_string(), &device(gpu)));
        }
        Err(_) => {
            page.say("devices", "none; a simulated NVIDIA H200 stands in for tests and replays");
        }
    }
    match &diagnosis.facts.host {
        Ok(host) => self::host(host, &mut page),
        Err(e) => page.say("host", &format!("unknown: {e}")),
    }
    for probe in &diagnosis.probes {
        page.say("probe", &self::probe(probe));
    }
    for line in ledgers::lines(&diagnosis.shared) {
        page.say("shared", &line);
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
    if let Some(node) = node {
        parts.push(match node.value {
            Some(id) => format!("near {id} ({})", node.source),
            None => "near no known node".to_owned(),
        });
    }
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

fn host(host: &Topology, page: &mut Page) {
    if host.nodes().is_empty() {
        page.say("nodes", "none that are known");
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
        let whose = if node.device_memory.value == Some(true) { "; a device's" } else { "" };
        page.say("nodes", &format!("{}: {cpus}; {memory}{whose}", node.id));
    }
    page.say("pages", &pages(host));
    page.say("limits", &limits(host));
}

fn pages(host: &Topology) -> String {
    let mut parts = Vec::new();
    if let Some(bytes) = host.page_size().value {
        parts.push(format!("base {}", Bytes(bytes)));
    }
    let size = host.thp_size().value.map_or(String::new(), |bytes| format!(" of {}", Bytes(bytes)));
    parts.push(match host.thp().value {
        Some(ThpMode::Always) => format!("transparent huge pages{size} everywhere"),
        Some(ThpMode::Madvise) => format!("transparent huge pages{size} on request"),
        Some(ThpMode::Never) => "transparent huge pages off".to_owned(),
        None => "transparent huge pages unknown".to_owned(),
    });
    for HugePool { page_size, total, free, .. } in host.huge_pools() {
        parts.push(format!("hugetlb {}: {free} of {total} free", Bytes(*page_size)));
    }
    parts.join("; ")
}

fn limits(host: &Topology) -> String {
    let limits = host.limits();
    let memory = match host.memory_limit().value {
        Some(limit) => {
            format!("control group {} of {} left", Bytes(limit.remaining), Bytes(limit.limit))
        }
        None => "no control group limit".to_owned(),
    };
    let locked = match limits.locked_memory.value {
        Some(u64::MAX) => "unlimited".to_owned(),
        Some(bytes) => format!("{} (the driver's pins do not count)", Bytes(bytes)),
        None => "unknown".to_owned(),
    };
    let mappings =
        limits.mappings.value.map_or("unknown".to_owned(), |count| Count(count).to_string());
    let overcommit = match limits.overcommit.value {
        Some(0) => "heuristic",
        Some(1) => "always",
        Some(2) => "never",
        _ => "unknown",
    };
    format!("{memory}; locked memory {locked}; mappings {mappings}; overcommit {overcommit}")
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
    let facts = &diagnosis.facts;
    // The cast saturates, which no real rate reaches.
    let whole = |rate: f64| json!(rate.round() as u64);
    let devices =
        facts.gpus.as_ref().map_or(Vec::new(), |gpus| gpus.iter().map(device_json).collect());
    let says = |kind: Kind| Value::Array(of(diagnosis, kind).map(|f| json!(f.says)).collect());
    let warnings = of(diagnosis, Kind::Warning)
        .map(|f| json!({ "says": f.says, "fix": f.fix.as_deref().unwrap_or(NOTHING) }));
    let probes = diagnosis.probes.iter().map(|probe| {
        let made = probe.region.as_ref();
        let placement = made.ok().map(|made| &made.report.placement);
        json!({
            "device": if let Target::Device(device, _) = probe.target { Some(device.0) } else { None },
            "node": probe.target.node().map(|id| id.0),
            "bytes": PROBE_BYTES,
            "pages_on_node": placement.map(|placement| placement.on_node()),
            "pages_elsewhere": placement.map(|placement| placement.elsewhere()),
            "pages_unknown": placement.map(|placement| placement.unknown),
            "error": made.err().map(ToString::to_string),
            "pinned": made.is_ok_and(|made| made.report.pinned_by != PinnedBy::Nobody),
            "pages": made.ok().map(|made| made.report.pages.to_string()),
            "make": made.ok().map(|made| whole(made.make)),
            "fill": made.ok().map(|made| whole(made.fill)),
            "up": probe.link.as_ref().and_then(|link| link.as_ref().ok()).map(|link| whole(link.up)),
            "down": probe.link.as_ref().and_then(|link| link.as_ref().ok()).map(|link| whole(link.down)),
            "copy_error": probe.link.as_ref().and_then(|link| link.as_ref().err()).map(ToString::to_string),
        })
    });
    json::object(&[
        (
            "driver",
            json!({
                "present": facts.gpus.is_ok(),
                "reason": facts.gpus.as_ref().err().map(ToString::to_string),
                "cuda_version": facts.version,
            }),
        ),
        ("devices", Value::Array(devices)),
        ("host", facts.host.as_ref().map_or(Value::Null, host_json)),
        ("probes", Value::Array(probes.collect())),
        ("shared", ledgers::as_json(&diagnosis.shared)),
        ("gets", says(Kind::Gets)),
        ("not_more", says(Kind::Limit)),
        ("warnings", Value::Array(warnings.collect())),
    ])
}

fn device_json(gpu: &Gpu) -> Value {
    let info = &gpu.info;
    json!({
        "ordinal": info.device.0,
        "name": info.name,
        "compute_capability": format!("{}.{}", info.compute_capability.0, info.compute_capability.1),
        "memory_bytes": info.memory,
        "free_bytes": gpu.memory.map(|m| m.free),
        "pci_address": info.pci_address,
        "node": gpu.node.as_ref().and_then(|node| node.value).map(|id| id.0),
        "host_memory_node": gpu.memory_node.as_ref().and_then(|node| node.value).map(|id| id.0),
        "node_source": gpu.node.as_ref().map(|node| node.source.to_string()),
        "virtual_memory": info.virtual_memory,
        "granularity_bytes": info.granularity,
        "async_pools": info.async_pools,
        "integrated": info.integrated,
        "transports": gpu.transports.iter().map(|(way, trial)| json!({
            "name": way.name(),
            "works": *trial == TransportTrial::Works,
        })).collect::<Vec<_>>(),
        "peers": info.peers.iter().map(|peer| peer.0).collect::<Vec<_>>(),
    })
}

fn host_json(host: &Topology) -> Value {
    let pool =
        |p: &HugePool| json!({ "page_bytes": p.page_size, "total": p.total, "free": p.free });
    let nodes = host.nodes().iter().map(|node| {
        json!({
            "id": node.id.0,
            "cpus": node.cpus.to_string(),
            "allowed_cpus": node.allowed_cpus.to_string(),
            "memory_allowed": node.memory_allowed,
            "device_memory": node.device_memory.value,
            "movable_only": node.movable_only.value,
            "memory_bytes": node.memory,
            "free_bytes": node.free,
            "huge_pools": node.huge_pools.iter().map(pool).collect::<Vec<_>>(),
        })
    });
    let thp = host.thp().value.map(|mode| match mode {
        ThpMode::Always => "always",
        ThpMode::Madvise => "madvise",
        ThpMode::Never => "never",
    });
    let (limits, headroom) = (host.limits(), host.headroom().ok());
    json!({
        "nodes": nodes.collect::<Vec<_>>(),
        "page_bytes": host.page_size().value,
        "transparent_huge_pages": thp,
        "huge_pools": host.huge_pools().iter().map(pool).collect::<Vec<_>>(),
        "headroom_bytes": headroom.as_ref().and_then(|headroom| headroom.bytes.value),
        "headroom_source": headroom.as_ref().map(|headroom| headroom.bytes.source.to_string()),
        "free_huge_page_bytes": headroom.as_ref().map(|headroom| headroom.huge_pages),
        "cgroup_limit_bytes": host.memory_limit().value.map(|limit| limit.limit),
        "cgroup_remaining_bytes": host.memory_limit().value.map(|limit| limit.remaining),
        "locked_memory_bytes": limits.locked_memory.value,
        "max_map_count": limits.mappings.value,
        "overcommit": limits.overcommit.value,
    })
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
            own: None,
            cap: None,
            transports: Vec::new(),
        };
        assert!(!device(&gpu(&info)).contains("reach"));
        assert_eq!(device_json(&gpu(&info))["peers"], json!([]));
        info.peers = vec![DeviceId(1), DeviceId(3)];
        assert!(device(&gpu(&info)).ends_with("kernels reach the memory of device 1 and device 3"));
        assert_eq!(device_json(&gpu(&info))["peers"], json!([1, 3]));
    }
}
