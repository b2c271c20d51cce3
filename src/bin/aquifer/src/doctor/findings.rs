//! What follows from the facts: what a program gets, and what should be mended.

use super::{
    facts::{Facts, Gpu},
    probe::{PROBE_BYTES, Probe},
};
use aquifer_core::Bytes;
use aquifer_host::{
    region::{Cause, PinnedBy, Shortfall, Step},
    topology::{ThpMode, Topology},
};

/// What sort of conclusion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// What a program gets.
    Gets,
    /// Why it does not get more. Nothing is amiss.
    Limit,
    /// Something is amiss.
    Warning,
}

/// One conclusion.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Finding {
    /// What sort.
    pub(crate) kind: Kind,
    /// What is so, and what it means.
    pub(crate) says: String,
    /// What to do about it; none where there is nothing to do. Of warnings only.
    pub(crate) fix: Option<String>,
}

impl Finding {
    fn gets(says: impl Into<String>) -> Self {
        Self { kind: Kind::Gets, says: says.into(), fix: None }
    }

    fn limit(says: impl Into<String>) -> Self {
        Self { kind: Kind::Limit, says: says.into(), fix: None }
    }

    fn mend(says: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { kind: Kind::Warning, says: says.into(), fix: Some(fix.into()) }
    }

    fn accept(says: impl Into<String>) -> Self {
        Self { kind: Kind::Warning, says: says.into(), fix: None }
    }
}

/// The share of a device's free memory that a pool takes at most, unless told otherwise, in per cent.
const DEFAULT_SHARE: u64 = 80;
/// Below this share of free memory another program's hold on a device is worth a word, in per cent.
const CROWDED: u64 = 50;
/// Host memory below which pinned pools are hardly of use.
const LITTLE_MEMORY: u64 = 1 << 30;
/// What the kernel grants by default.
const USUAL_MAPPINGS: u64 = 65_530;

/// Everything that can be said.
pub(crate) fn conclude(facts: &Facts, probe: Option<&Probe>) -> Vec<Finding> {
    let mut findings = Vec::new();
    gpus(facts, &mut findings);
    if let Some(probe) = probe {
        self::probe(probe, facts.gpus.is_ok(), &mut findings);
    }
    match &facts.host {
        Ok(host) => self::host(host, &mut findings),
        Err(e) => findings.push(Finding::mend(
            format!("the host cannot be read: {e}"),
            "put right what it names, then look again",
        )),
    }
    findings
}

fn gpus(facts: &Facts, findings: &mut Vec<Finding>) {
    match &facts.gpus {
        Ok(gpus) => gpus.iter().for_each(|gpu| self::gpu(gpu, findings)),
        Err(_) => {
            findings.push(Finding::gets("device memory: of a simulated GPU, which checks every access"));
            findings.push(Finding::mend(
                "no GPU can be used, for the reason above: programs fall back to the simulated one",
                "on a machine with an NVIDIA GPU, install its driver (CUDA 12.0 or later) and, in a container, \
                 pass the GPU in; on others there is nothing to do",
            ));
        }
    }
}

fn probe(probe: &Probe, has_driver: bool, findings: &mut Vec<Finding>) {
    let made = match &probe.region {
        Ok(made) => made,
        Err(e) => {
            findings.push(Finding::mend(
                format!("host memory: a region of {} cannot be made: {e}", Bytes(PROBE_BYTES as u64)),
                "free memory, or lift the limit that it names",
            ));
            return;
        }
    };
    let report = &made.report;
    let pinned = match report.pinned_by {
        PinnedBy::Registration(_) => "pinned",
        PinnedBy::Driver => "pinned by the driver itself, slowly",
        PinnedBy::Nobody => "pageable",
    };
    let mut says = format!("host memory: {pinned}, in {}", report.pages);
    let placement = &report.placement;
    if let Some(node) = placement.wanted {
        let (there, elsewhere) = (placement.on_node(), placement.elsewhere());
        says += &format!(", {there} of {} pages on {node}", there + elsewhere + placement.unknown);
    }
    match &probe.link {
        Some(Ok(link)) => {
            says += &format!("; copies run at {} up, {} down", gigabytes(link.up), gigabytes(link.down));
        }
        Some(Err(e)) => findings.push(Finding::mend(
            format!("host memory is pinned but cannot be copied: {e}"),
            "look for NVRM in the kernel's log (dmesg), and free memory on the device",
        )),
        None => {}
    }
    findings.push(Finding::gets(says));
    for shortfall in &report.shortfalls {
        findings.extend(self::shortfall(shortfall, has_driver));
    }
}

/// What a shortfall means. Those that other findings tell of already mean nothing new.
fn shortfall(shortfall: &Shortfall, has_driver: bool) -> Option<Finding> {
    let told = format!("host memory, {shortfall}");
    match &shortfall.cause {
        // A better tier than the one that was had: worth a word and no warning.
        Cause::HugePages { .. } | Cause::NotHuge => Some(Finding::limit(told)),
        Cause::NoDriver if !has_driver => Some(Finding::limit(told)),
        // Said with the mode that the kernel is in, by whoever looks at it.
        Cause::NotOffered | Cause::NumaOff | Cause::NoCpus(_) => None,
        Cause::Touched => Some(Finding::accept(told)),
        Cause::System(_) if shortfall.step == Step::Policy => Some(Finding::accept(format!(
            "{told}: this sandbox forbids memory policies, so threads on the node touch the pages first"
        ))),
        Cause::Driver(_) if shortfall.step == Step::Register => Some(Finding::mend(
            told,
            "free locked or registered memory, or see the kernel's log (dmesg) for NVRM",
        )),
        Cause::Misplaced { .. } => Some(Finding::mend(told, "free memory on that node, or widen the cpuset")),
        _ => Some(Finding::accept(told)),
    }
}

fn gpu(gpu: &Gpu, findings: &mut Vec<Finding>) {
    let Gpu { info, memory, node } = gpu;
    let device = info.device;
    let most = memory.map_or(String::new(), |m| {
        format!(", up to {} unless told otherwise", Bytes(m.free / 100 * DEFAULT_SHARE))
    });
    let segments = if info.virtual_memory {
        "a caching pool whose memory moves to where it is needed"
    } else {
        "a caching pool of plain segments"
    };
    findings.push(Finding::gets(format!("memory of {device}: {segments}{most}")));
    if !info.virtual_memory {
        findings.push(Finding::accept(format!(
            "{device} has no virtual memory management, as under WSL: memory cannot move, so a tight budget holds less"
        )));
    }
    if !info.async_pools {
        findings.push(Finding::accept(format!(
            "{device} has no stream-ordered pools: `--allocator async` fails on it"
        )));
    }
    if info.integrated {
        findings.push(Finding::accept(format!(
            "{device} shares the host's memory: what the host takes, it lacks"
        )));
    }
    if let Some(m) = memory.filter(|m| m.free < m.total / 100 * CROWDED) {
        findings.push(Finding::mend(
            format!(
                "{device} has {} of {} free: other programs hold the rest",
                Bytes(m.free),
                Bytes(m.total)
            ),
            "see who with `nvidia-smi`, and end what is not needed",
        ));
    }
    if let Some(node) = node.as_ref().filter(|node| node.value.is_none()) {
        findings.push(Finding::accept(format!(
            "nobody knows which node {device} is near to ({}): its pinned memory lies where it is touched first",
            node.source
        )));
    }
}

fn host(host: &Topology, findings: &mut Vec<Finding>) {
    nodes(host, findings);
    pages(host, findings);
    limits(host, findings);
}

fn nodes(host: &Topology, findings: &mut Vec<Finding>) {
    if host.numa_setting().value == Some(false) {
        findings.push(Finding::mend(
            format!("NUMA handling is off ({}): nothing is placed", host.numa_setting().source),
            "unset it, unless that is what you want",
        ));
    }
    for node in host.nodes() {
        if !node.cpus.is_empty() && node.allowed_cpus.is_empty() {
            findings.push(Finding::mend(
                format!(
                    "this process may not run on {}: its memory is touched first from another node",
                    node.id
                ),
                format!("widen the cpuset to CPUs {}, or leave this node alone", node.cpus),
            ));
        }
        if !node.memory_allowed && node.memory.is_some_and(|bytes| bytes > 0) {
            findings.push(Finding::mend(
                format!("this process may not take memory from {}", node.id),
                format!("widen the cpuset's memory nodes (cpuset.mems) by {}", node.id.0),
            ));
        }
    }
}

fn pages(host: &Topology, findings: &mut Vec<Finding>) {
    match host.thp().value {
        Some(ThpMode::Never) => findings.push(Finding::mend(
            "transparent huge pages are off: pinning takes about twice as long",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )),
        Some(_) => {}
        None => findings.push(Finding::accept(
            "this kernel does not say whether it has transparent huge pages: pinning may take twice as long",
        )),
    }
}

fn limits(host: &Topology, findings: &mut Vec<Finding>) {
    if let Some(limit) = host.memory_limit().value.filter(|limit| limit.remaining < LITTLE_MEMORY) {
        findings.push(Finding::mend(
            format!(
                "the control group leaves {} of its {}: a pinned pool beyond that is killed, not refused",
                Bytes(limit.remaining),
                Bytes(limit.limit)
            ),
            format!("raise the limit in {}, or keep pinned pools small", host.memory_limit().source),
        ));
    }
    let limits = host.limits();
    if limits.overcommit.value == Some(2) {
        findings.push(Finding::mend(
            "the kernel never overcommits: large address ranges may be refused",
            "sysctl vm.overcommit_memory=0",
        ));
    }
    if let Some(mappings) = limits.mappings.value.filter(|&mappings| mappings < USUAL_MAPPINGS) {
        findings.push(Finding::mend(
            format!("a process may have {mappings} mappings only"),
            format!("sysctl vm.max_map_count={USUAL_MAPPINGS}"),
        ));
    }
}

/// A rate as vendors write it: in units of 10^9.
pub(crate) fn gigabytes(rate: f64) -> String {
    format!("{:.1} GB/s", rate / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::probe::Made;
    use aquifer_core::{Budget, SystemError};
    use aquifer_driver::{DeviceId, DeviceInfo, DriverError, MemoryInfo};
    use aquifer_host::{
        kernel::Kernel,
        region::{Host, Region, RegionRequest},
        topology::{Found, NodeId, Source},
    };

    fn h200() -> Gpu {
        let mut info = DeviceInfo::new(DeviceId(0), "NVIDIA H200".into(), 150_754_820_096);
        (info.virtual_memory, info.async_pools, info.granularity) = (true, true, 2 << 20);
        let memory = Some(MemoryInfo { free: 150_000_000_000, total: 150_754_820_096 });
        Gpu { info, memory, node: Some(Found::known(NodeId(0), Source::Nobody)) }
    }

    fn warnings(gpu: &Gpu) -> Vec<String> {
        let mut all = Vec::new();
        self::gpu(gpu, &mut all);
        all.into_iter().filter(|f| f.kind == Kind::Warning).map(|f| f.says).collect()
    }

    #[test]
    fn a_good_gpu_is_not_complained_about() {
        assert_eq!(warnings(&h200()), Vec::<String>::new());
    }

    #[test]
    fn whatever_a_gpu_lacks_is_told() {
        let mut gpu = h200();
        (gpu.info.virtual_memory, gpu.info.async_pools, gpu.info.integrated) = (false, false, true);
        gpu.memory = Some(MemoryInfo { free: 1 << 30, total: 8 << 30 });
        gpu.node = Some(Found::unknown(Source::Nobody));
        let told = warnings(&gpu).join("\n");
        for word in ["virtual memory", "stream-ordered", "shares", "1.00 GiB of 8.00 GiB", "nobody knows"] {
            assert!(told.contains(word), "{word}: {told}");
        }
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn without_a_gpu_there_is_a_way_out() {
        let facts = Facts {
            gpus: Err(crate::gpu::NoGpu::Open(aquifer_driver::cuda::OpenError::NoLibrary)),
            version: None,
            host: Topology::read_under(std::path::Path::new("/nothing/here")),
        };
        let all = conclude(&facts, None);
        let warning = all.iter().find(|f| f.kind == Kind::Warning && f.says.starts_with("no GPU")).unwrap();
        assert!(warning.fix.as_ref().is_some_and(|fix| fix.contains("install its driver")));
        assert!(all.iter().any(|f| f.kind == Kind::Gets && f.says.contains("simulated")));
    }

    /// The findings for a region of this machine's with other shortfalls, and a link.
    fn probed(
        shortfalls: Vec<Shortfall>,
        link: Option<Result<super::super::probe::Link, DriverError>>,
    ) -> Vec<Finding> {
        let host = Host::new(Topology::read().unwrap(), Kernel::new());
        let region =
            Region::new(&host, &Budget::new("a test", 1 << 20), &RegionRequest::bytes(4096)).unwrap();
        let mut report = region.report().clone();
        report.shortfalls = shortfalls;
        let mut all = Vec::new();
        let probe = Probe { region: Ok(Made { report, make: 1e9, fill: 1e9 }), link };
        self::probe(&probe, true, &mut all);
        all
    }

    #[test]
    fn a_shortfall_warns_only_where_something_is_amiss() {
        let refused = SystemError { call: "mbind", errno: 1 };
        let driver = DriverError { call: "cuMemHostRegister", code: 2, name: "CUDA_ERROR_OUT_OF_MEMORY" };
        let table = [
            (Step::Map, Cause::HugePages { needed: 32, free: Some(0) }, Some(Kind::Limit)),
            (Step::Pages, Cause::NotOffered, None),
            (Step::Policy, Cause::System(refused), Some(Kind::Warning)),
            (Step::Register, Cause::Driver(driver), Some(Kind::Warning)),
            (Step::Verify, Cause::Misplaced { elsewhere: 3, unknown: 0 }, Some(Kind::Warning)),
        ];
        for (step, cause, expected) in table {
            let told = probed(vec![Shortfall { step, cause: cause.clone() }], None);
            let kinds: Vec<_> = told.iter().map(|f| f.kind).filter(|kind| *kind != Kind::Gets).collect();
            assert_eq!(kinds, expected.into_iter().collect::<Vec<_>>(), "{cause:?}");
        }
        let told = probed(Vec::new(), Some(Err(driver)));
        assert!(told.iter().any(|f| f.kind == Kind::Warning && f.says.contains("cuMemHostRegister")));
    }
}
