//! The metrics of one pool: names, types, help, and figures.

use aquifer_status::PoolStatus;

/// Whether a figure may fall.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum MetricType {
    Gauge,
    Counter,
}

impl MetricType {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Counter => "counter",
        }
    }
}

/// One metric, with the figure of a pool.
pub(super) struct PoolFamily {
    pub(super) name: &'static str,
    pub(super) of: MetricType,
    pub(super) help: &'static str,
    pub(super) figure: fn(&PoolStatus) -> Option<u64>,
}

const fn gauge(
    name: &'static str,
    help: &'static str,
    figure: fn(&PoolStatus) -> Option<u64>,
) -> PoolFamily {
    PoolFamily { name, of: MetricType::Gauge, help, figure }
}

const fn counter(
    name: &'static str,
    help: &'static str,
    figure: fn(&PoolStatus) -> Option<u64>,
) -> PoolFamily {
    PoolFamily { name, of: MetricType::Counter, help, figure }
}

/// All metrics of a pool, in the order of the text.
pub(super) const POOL_FAMILIES: [PoolFamily; 22] = [
    gauge("aquifer_memory_live_bytes", "Bytes in live blocks, in rounded sizes.", |p| {
        Some(p.stats.live)
    }),
    gauge("aquifer_memory_requested_bytes", "Bytes in live blocks, in requested sizes.", |p| {
        Some(p.stats.requested)
    }),
    gauge("aquifer_memory_cached_bytes", "Free bytes that can be allocated again.", |p| {
        Some(p.stats.cached)
    }),
    gauge("aquifer_memory_pending_bytes", "Freed bytes that wait for queued work.", |p| {
        Some(p.stats.pending)
    }),
    gauge("aquifer_memory_physical_bytes", "Bytes held from the driver or the kernel.", |p| {
        Some(p.stats.physical)
    }),
    gauge("aquifer_memory_graphs_bytes", "Bytes held for graphs, live or free.", |p| {
        Some(p.stats.graphs)
    }),
    gauge("aquifer_memory_limit_bytes", "Limit of the tightest budget above the pool.", |p| {
        p.limit
    }),
    gauge("aquifer_memory_largest_free_bytes", "Largest free extent, where it is known.", |p| {
        p.largest_free
    }),
    gauge("aquifer_memory_live_peak_bytes", "Maximum of the live bytes.", |p| {
        Some(p.stats.peak_live)
    }),
    gauge("aquifer_memory_requested_peak_bytes", "Maximum of the requested bytes.", |p| {
        Some(p.stats.peak_requested)
    }),
    gauge("aquifer_memory_physical_peak_bytes", "Maximum of the physical bytes.", |p| {
        Some(p.stats.peak_physical)
    }),
    gauge("aquifer_memory_blocks", "Live blocks.", |p| Some(p.stats.blocks)),
    counter("aquifer_memory_allocations_total", "Allocations that succeeded.", |p| {
        Some(p.stats.allocations)
    }),
    counter("aquifer_memory_frees_total", "Blocks freed.", |p| Some(p.stats.frees)),
    counter("aquifer_memory_allocation_failures_total", "Allocations that failed.", |p| {
        Some(p.stats.failures)
    }),
    counter("aquifer_memory_growths_total", "Growths by the driver or the kernel.", |p| {
        Some(p.stats.growths)
    }),
    counter("aquifer_memory_released_bytes_total", "Bytes released to driver or kernel.", |p| {
        Some(p.stats.reaped)
    }),
    counter("aquifer_memory_moves_total", "Physical handles moved between addresses.", |p| {
        Some(p.stats.moves)
    }),
    counter(
        "aquifer_memory_adoptions_total",
        "Searches that found another stream's memory.",
        |p| Some(p.stats.adoptions),
    ),
    counter("aquifer_memory_fences_total", "Events recorded to fence a stream.", |p| {
        Some(p.stats.fences)
    }),
    counter("aquifer_memory_stream_waits_total", "Waits of one stream for another.", |p| {
        Some(p.stats.stream_waits)
    }),
    counter("aquifer_memory_host_waits_total", "Waits of the host for queued work.", |p| {
        Some(p.stats.host_waits)
    }),
];
