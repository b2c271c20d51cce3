//! The figures of this process as metrics of OpenTelemetry.
//!
//! | instrument | unit | figure |
//! |---|---|---|
//! | `aquifer.memory.live`, `.requested`, `.cached`, `.pending`, `.physical`, `.graphs` | `By` | the bytes of [`PoolStats`] of that name |
//! | `aquifer.memory.limit`, `.largest_free` | `By` | where they are known |
//! | `aquifer.memory.peak.live`, `.peak.requested`, `.peak.physical` | `By` | the maxima so far |
//! | `aquifer.memory.blocks` | `{block}` | live blocks |
//! | `aquifer.memory.allocations`, `.frees`, `.failures` | `{allocation}` | counters |
//! | `aquifer.memory.released` | `By` | bytes given back to the driver or the kernel, a counter |
//! | `aquifer.memory.growths`, `.moves`, `.adoptions`, `.fences`, `.stream_waits`, `.host_waits` | `{operation}` | counters |

use crate::reader::{PoolStatus, ProcessStatus, pools};
use aquifer_core::PoolStats;
use opentelemetry::{KeyValue, metrics::Meter};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// One reading serves the instruments of one collection.
const FRESH: Duration = Duration::from_millis(50);

type Figure = fn(&PoolStats) -> u64;

/// Name, unit, description, and figure.
type Instrument = (&'static str, &'static str, &'static str, Figure);

const GAUGES: [Instrument; 10] = [
    ("aquifer.memory.live", "By", "Bytes in live blocks.", |s| s.live),
    ("aquifer.memory.requested", "By", "Bytes requested of live blocks.", |s| s.requested),
    ("aquifer.memory.cached", "By", "Free bytes that can be allocated again.", |s| s.cached),
    ("aquifer.memory.pending", "By", "Freed bytes that wait for queued work.", |s| s.pending),
    ("aquifer.memory.physical", "By", "Bytes held from the driver or kernel.", |s| s.physical),
    ("aquifer.memory.graphs", "By", "Bytes held for graphs.", |s| s.graphs),
    ("aquifer.memory.peak.live", "By", "Maximum of the live bytes.", |s| s.peak_live),
    ("aquifer.memory.peak.requested", "By", "Maximum of the requested.", |s| s.peak_requested),
    ("aquifer.memory.peak.physical", "By", "Maximum of the physical bytes.", |s| s.peak_physical),
    ("aquifer.memory.blocks", "{block}", "Live blocks.", |s| s.blocks),
];

const COUNTERS: [Instrument; 10] = [
    ("aquifer.memory.allocations", "{allocation}", "Allocations.", |s| s.allocations),
    ("aquifer.memory.frees", "{allocation}", "Blocks freed.", |s| s.frees),
    ("aquifer.memory.failures", "{allocation}", "Allocations that failed.", |s| s.failures),
    ("aquifer.memory.released", "By", "Bytes released to the driver or kernel.", |s| s.reaped),
    ("aquifer.memory.growths", "{operation}", "Growths of pools.", |s| s.growths),
    ("aquifer.memory.moves", "{operation}", "Physical handles moved.", |s| s.moves),
    (
        "aquifer.memory.adoptions",
        "{operation}",
        "Searches that found another stream's memory.",
        |s| s.adoptions,
    ),
    ("aquifer.memory.fences", "{operation}", "Events recorded as fences.", |s| s.fences),
    ("aquifer.memory.stream_waits", "{operation}", "Waits of streams.", |s| s.stream_waits),
    ("aquifer.memory.host_waits", "{operation}", "Waits of the host.", |s| s.host_waits),
];

/// The pools of one kind, name and place, whose figures are added up: two measurements with equal
/// attributes would replace each other.
#[derive(Clone)]
struct AttributedPools {
    attributes: Vec<KeyValue>,
    stats: PoolStats,
    limit: Option<u64>,
    largest_free: Option<u64>,
}

/// The last reading of this process's figures.
#[derive(Default)]
struct CachedReading(Mutex<Option<(Instant, Arc<[AttributedPools]>)>>);

impl CachedReading {
    fn pools(&self) -> Arc<[AttributedPools]> {
        // A panic while it was held has left an older reading, or none.
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some((at, pools)) if at.elapsed() < FRESH => pools.clone(),
            _ => {
                // What cannot be read has no measurements: an exporter then shows a gap.
                let pools = ProcessStatus::current().ok().flatten().map_or_else(Vec::new, grouped);
                let pools: Arc<[AttributedPools]> = pools.into();
                *last = Some((Instant::now(), pools.clone()));
                pools
            }
        }
    }
}

fn grouped(process: ProcessStatus) -> Vec<AttributedPools> {
    let mut groups: Vec<AttributedPools> = Vec::new();
    for pool in process.pools {
        let attributes = attributes_of(&pool);
        match groups.iter_mut().find(|group| group.attributes == attributes) {
            Some(group) => {
                group.stats = pools::sum(&group.stats, &pool.stats);
                // Two limits have no sum where a budget above both is tighter.
                group.limit = group.limit.filter(|_| group.limit == pool.limit);
                group.largest_free = group.largest_free.max(pool.largest_free);
            }
            None => groups.push(AttributedPools {
                attributes,
                stats: pool.stats,
                limit: pool.limit,
                largest_free: pool.largest_free,
            }),
        }
    }
    groups
}

fn attributes_of(pool: &PoolStatus) -> Vec<KeyValue> {
    let mut attributes = vec![
        KeyValue::new("aquifer.pool.kind", pool.kind.name()),
        KeyValue::new("aquifer.pool.name", pool.name.clone()),
    ];
    let numbers = [("aquifer.device.ordinal", pool.device), ("aquifer.numa.node", pool.node)];
    for (name, number) in numbers {
        attributes.extend(number.map(|number| KeyValue::new(name, i64::from(number))));
    }
    let address = pool.address.clone();
    attributes.extend(address.map(|address| KeyValue::new("aquifer.device.address", address)));
    attributes
}

/// Registers the memory figures of this process as observable instruments of `meter`: gauges in
/// bytes, and counters, for each pool.
///
/// The figures are read when the meter's provider collects, at most once in 50 ms. Nothing is
/// measured before the first pool, and where publication is off. The number of series is bounded:
/// a process shows at most 256 pools, and tags are no attributes. The instruments live as long as
/// the meter's provider. Call this once for each provider.
///
/// ```
/// # let provider = opentelemetry_sdk::metrics::SdkMeterProvider::default();
/// use opentelemetry::metrics::MeterProvider;
/// aquifer::status::register_metrics(&provider.meter("aquifer"));
/// ```
pub fn register_metrics(meter: &Meter) {
    let reading = Arc::new(CachedReading::default());
    for (name, unit, description, figure) in GAUGES {
        let reading = reading.clone();
        let builder = meter.u64_observable_gauge(name).with_unit(unit);
        let _instrument = builder
            .with_description(description)
            .with_callback(move |observer| {
                for pool in &*reading.pools() {
                    observer.observe(figure(&pool.stats), &pool.attributes);
                }
            })
            .build();
    }
    for (name, unit, description, figure) in COUNTERS {
        let reading = reading.clone();
        let builder = meter.u64_observable_counter(name).with_unit(unit);
        let _instrument = builder
            .with_description(description)
            .with_callback(move |observer| {
                for pool in &*reading.pools() {
                    observer.observe(figure(&pool.stats), &pool.attributes);
                }
            })
            .build();
    }
    type Optional = fn(&AttributedPools) -> Option<u64>;
    let optional: [(&'static str, &'static str, Optional); 2] = [
        ("aquifer.memory.limit", "Limit of the tightest budget.", |pool| pool.limit),
        ("aquifer.memory.largest_free", "Largest free extent.", |pool| pool.largest_free),
    ];
    for (name, description, figure) in optional {
        let reading = reading.clone();
        let builder = meter.u64_observable_gauge(name).with_unit("By");
        let _instrument = builder
            .with_description(description)
            .with_callback(move |observer| {
                for pool in &*reading.pools() {
                    if let Some(value) = figure(pool) {
                        observer.observe(value, &pool.attributes);
                    }
                }
            })
            .build();
    }
}
