//! Conclusions from the facts: what a program gets, and what should be fixed.

use super::{
    facts::{Facts, Finding, Gpu},
    places,
    probe::Probe,
    transports,
};
use aquifer_core::Bytes;
use aquifer_host::topology::{ThpMode, Topology};

/// The default limit of a pool, in per cent of the device's free memory.
const DEFAULT_SHARE: u64 = 80;
/// The share of free memory, in per cent, below which a device is reported as crowded.
const CROWDED: u64 = 50;
/// The amount of host memory below which pinned pools are of little use.
const LITTLE_MEMORY: u64 = 1 << 30;
/// The default limit of pinned pools, in per cent of the host memory that is left.
const PINNED_SHARE: u64 = 50;
/// Returns all findings.
pub(crate) fn conclude(facts: &Facts, probes: &[Probe]) -> Vec<Finding> {
    let mut findings = Vec::new();
    gpus(facts, &mut findings);
    places::tried(facts, probes, &mut findings);
    match &facts.host {
        Ok(host) => {
            places::nodes(host, &mut findings);
            places::devices(facts, &mut findings);
            self::host(host, &mut findings);
        }
        Err(e) => findings.push(Finding::mend(
            format!("the host cannot be read: {e}"),
            "put right what it names, then look again",
        )),
    }
    findings
}

fn gpus(facts: &Facts, findings: &mut Vec<Finding>) {
    match &facts.gpus {
        Ok(gpus) => {
            let has_nodes = facts.host.as_ref().is_ok_and(|host| !host.nodes().is_empty());
            gpus.iter().for_each(|gpu| self::gpu(gpu, has_nodes, findings));
        }
        Err(_) => {
            findings.push(Finding::gets(
                "device memory: of a simulated GPU, which checks every access",
            ));
            findings.push(Finding::mend(
                "no GPU can be used, for the reason above: programs fall back to the simulated one",
                "on a machine with an NVIDIA GPU, install its driver (CUDA 12.0 or later) and, in a container, \
                 pass the GPU in; on others there is nothing to do",
            ));
        }
    }
}

fn gpu(gpu: &Gpu, has_nodes: bool, findings: &mut Vec<Finding>) {
    let Gpu { info, memory, node, .. } = gpu;
    let device = info.device;
    let most = memory.map_or(String::new(), |m| {
        format!(", up to {} unless told otherwise", Bytes(m.free / 100 * DEFAULT_SHARE))
    });
    let segments = if info.virtual_memory {
        "a caching pool whose memory moves to where it is needed"
    } else {
        "an allocation of the driver for each block, since it cannot map memory"
    };
    findings.push(Finding::gets(format!("memory of {device}: {segments}{most}")));
    let [works, refused] = transports::lines(info, &gpu.transports);
    findings.extend(works.map(Finding::gets));
    findings.extend(refused.map(Finding::limit));
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
    match &gpu.cap {
        Some(Ok(cap)) => findings.extend(cap.value.map(|bytes| {
            let (bytes, source) = (Bytes(bytes), &cap.source);
            Finding::limit(format!("{device}: this process can take at most {bytes}, by {source}"))
        })),
        Some(Err(e)) => findings.push(Finding::mend(
            format!("the cap on the memory of {device} cannot be read: {e}"),
            "correct what it names",
        )),
        None => {}
    }
    if has_nodes && node.is_none() {
        findings.push(Finding::accept(format!(
            "nobody knows which node {device} is near to: its pinned memory lies where it is touched first"
        )));
    }
}

fn host(host: &Topology, findings: &mut Vec<Finding>) {
    headroom(host, findings);
    pages(host, findings);
}

/// Reports how much host memory is left, and what limits it.
fn headroom(host: &Topology, findings: &mut Vec<Finding>) {
    let headroom = match host.headroom() {
        Ok(headroom) => headroom,
        Err(e) => {
            findings.push(Finding::mend(
                format!("how much memory is left cannot be told: {e}"),
                "put right what it names, then look again",
            ));
            return;
        }
    };
    let Some(left) = headroom.value else {
        findings.push(Finding::accept(format!(
            "nobody tells how much of the host's memory is left ({})",
            headroom.source
        )));
        return;
    };
    let most = Bytes(left / 100 * PINNED_SHARE);
    findings.push(Finding::gets(format!("pinned memory: up to {most} unless told otherwise")));
    let limited = format!("{} of host memory is left, by {}", Bytes(left), headroom.source);
    findings.push(if left < LITTLE_MEMORY {
        let fix =
            "end what is not needed, raise the limit that is named, or keep pinned pools small";
        Finding::mend(format!("{limited}: a pinned pool beyond that is killed, not refused"), fix)
    } else {
        Finding::limit(limited)
    });
}

fn pages(host: &Topology, findings: &mut Vec<Finding>) {
    match host.thp() {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::facts::Kind;
    use aquifer_driver::{DeviceId, DeviceInfo, MemoryInfo};
    use aquifer_host::topology::NodeId;

    fn h200() -> Gpu {
        let mut info = DeviceInfo::new(DeviceId(0), "NVIDIA H200".into(), 150_754_820_096);
        (info.virtual_memory, info.async_pools, info.granularity) = (true, true, 2 << 20);
        let memory = Some(MemoryInfo { free: 150_000_000_000, total: 150_754_820_096 });
        let node = Some(NodeId(0));
        Gpu { info, memory, memory_node: node, node, cap: None, transports: Vec::new() }
    }

    fn warnings(gpu: &Gpu) -> Vec<String> {
        let mut all = Vec::new();
        self::gpu(gpu, true, &mut all);
        all.into_iter().filter(|f| f.kind == Kind::Warning).map(|f| f.says).collect()
    }

    #[test]
    fn a_good_gpu_is_not_complained_about() {
        assert_eq!(warnings(&h200()), Vec::<String>::new());
    }

    #[test]
    fn a_cap_is_shown_with_its_source_and_a_bad_one_is_a_warning() {
        let host = Topology::read_under(std::path::Path::new("/nothing/here")).unwrap();
        let mut gpu = h200();
        let shown = |gpu: &Gpu| {
            let mut all = Vec::new();
            self::gpu(gpu, true, &mut all);
            all.into_iter().map(|f| (f.kind, f.says)).collect::<Vec<_>>()
        };
        gpu.cap = Some(host.clone().with_mps_limit("0=64G").device_cap(&gpu.info));
        let says = "device 0: this process can take at most 64.00 GiB, by environment variable \
                    CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
        assert!(shown(&gpu).contains(&(Kind::Limit, says.to_owned())), "{:?}", shown(&gpu));
        gpu.cap = Some(host.with_mps_limit("64G").device_cap(&gpu.info));
        assert!(warnings(&gpu).join("\n").contains("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"));
    }

    #[test]
    fn whatever_a_gpu_lacks_is_told() {
        let mut gpu = h200();
        (gpu.info.virtual_memory, gpu.info.async_pools, gpu.info.integrated) = (false, false, true);
        gpu.memory = Some(MemoryInfo { free: 1 << 30, total: 8 << 30 });
        gpu.node = None;
        let told = warnings(&gpu).join("\n");
        for word in
            ["virtual memory", "stream-ordered", "shares", "1.00 GiB of 8.00 GiB", "nobody knows"]
        {
            assert!(told.contains(word), "{word}: {told}");
        }
    }

    #[test]
    fn what_is_left_of_the_host_is_told_with_what_limits_it() {
        let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../../allocators/host/tests/fixtures");
        for (machine, kind, told) in [
            ("cpuset-container-v2", Kind::Gets, "pinned memory: up to 1.50 GiB"),
            (
                "cpuset-container-v2",
                Kind::Limit,
                "3.00 GiB of host memory is left, by /sys/fs/cgroup/memory.max",
            ),
            (
                "cpuset-container",
                Kind::Warning,
                "of host memory is left, by /sys/devices/system/node: a pinned",
            ),
            (
                "wsl",
                Kind::Warning,
                "nobody tells how much of the host's memory is left (/proc/meminfo)",
            ),
        ] {
            let host = Topology::read_under(&fixtures.join(machine)).unwrap();
            let mut all = Vec::new();
            headroom(&host, &mut all);
            assert!(
                all.iter().any(|f| f.kind == kind && f.says.contains(told)),
                "{machine}: {all:?}"
            );
        }
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn without_a_gpu_there_is_a_way_out() {
        let facts = Facts {
            gpus: Err(aquifer_benches::console::gpu::NoUsableGpu::Open(
                aquifer_driver::cuda::OpenError::NoLibrary,
            )),
            version: None,
            host: Topology::read_under(std::path::Path::new("/nothing/here")),
        };
        let all = conclude(&facts, &[]);
        let warning =
            all.iter().find(|f| f.kind == Kind::Warning && f.says.starts_with("no GPU")).unwrap();
        assert!(warning.fix.as_ref().is_some_and(|fix| fix.contains("install its driver")));
        assert!(all.iter().any(|f| f.kind == Kind::Gets && f.says.contains("simulated")));
    }
}
