//! The figures of this process as metrics: what an exporter receives is what pools have published.

#![expect(clippy::expect_used, clippy::panic, reason = "helpers of tests")]

use aquifer_core::PoolStats;
use aquifer_status::{
    PoolFigures, PoolKind, PoolSlot, ProcessStatus, SlotDescription, register_metrics, start,
};
use opentelemetry::{KeyValue, metrics::MeterProvider};
use opentelemetry_sdk::metrics::{
    InMemoryMetricExporter, PeriodicReader, SdkMeterProvider,
    data::{AggregatedMetrics, MetricData, ResourceMetrics},
};
use std::{env, fs, os::unix::fs::DirBuilderExt, process};

fn slot(name: &str, device: u32) -> PoolSlot {
    PoolSlot::open(SlotDescription {
        kind: PoolKind::Device,
        name: name.to_owned(),
        device: Some(device),
        address: None,
        node: None,
    })
}

fn publish(slot: &PoolSlot, live: u64, limit: Option<u64>) {
    let mut figures = PoolFigures::default();
    let mut stats = PoolStats::default();
    (stats.live, stats.physical, stats.allocations, stats.host_waits) = (live, 2 * live, 7, 3);
    (figures.stats, figures.limit) = (stats, limit);
    slot.publish(|| figures);
}

/// The name of the pool in the attributes of a measurement.
fn pool_of<'a>(mut attributes: impl Iterator<Item = &'a KeyValue>) -> String {
    let pool = attributes.find(|attribute| attribute.key.as_str() == "aquifer.pool.name");
    pool.expect("a name").value.as_str().into_owned()
}

/// The values of an instrument, by the name of the pool.
fn values(all: &[ResourceMetrics], name: &str) -> Vec<(String, u64)> {
    let metrics = all.iter().flat_map(ResourceMetrics::scope_metrics);
    let mut found = Vec::new();
    for metric in metrics.flat_map(|scope| scope.metrics()).filter(|m| m.name() == name) {
        match metric.data() {
            AggregatedMetrics::U64(MetricData::Gauge(gauge)) => {
                assert!(!name.ends_with("allocations"));
                found.extend(
                    gauge.data_points().map(|point| (pool_of(point.attributes()), point.value())),
                );
            }
            AggregatedMetrics::U64(MetricData::Sum(sum)) => {
                assert!(sum.is_monotonic());
                found.extend(
                    sum.data_points().map(|point| (pool_of(point.attributes()), point.value())),
                );
            }
            other => panic!("{other:?}"),
        }
    }
    found.sort();
    found
}

/// One test, since a process publishes once and its environment is its own.
#[test]
fn an_exporter_receives_the_published_figures_of_all_pools_of_the_process() {
    let folder = env::temp_dir().join(format!("aquifer-telemetry-{}", process::id()));
    let _absent = fs::remove_dir_all(&folder);
    fs::DirBuilder::new().mode(0o700).create(&folder).unwrap();
    assert_eq!(ProcessStatus::current().unwrap(), None, "nothing is published yet");
    // SAFETY: 1. The only test of this process, and no other thread runs.
    #[expect(unsafe_code, reason = "sets the folder of this process")]
    unsafe {
        env::set_var("AQUIFER_STATUS", &folder);
    }
    let exporter = InMemoryMetricExporter::default();
    let provider = SdkMeterProvider::builder()
        .with_reader(PeriodicReader::builder(exporter.clone()).build())
        .build();
    register_metrics(&provider.meter("aquifer"));
    start().unwrap();
    let (first, second, third) = (slot("a", 0), slot("a", 0), slot("b", 1));
    publish(&first, 100, Some(5000));
    publish(&second, 10, Some(5000));
    publish(&third, 1, None);

    let own = ProcessStatus::current().unwrap().expect("it publishes");
    assert!(own.is_alive() && own.process == process::id());
    assert_eq!((own.pools.len(), own.total().live), (3, 111));
    let json = serde_json::to_value(&own).unwrap();
    assert_eq!(json["pools"][2]["kind"], "device");
    assert_eq!(json["pools"][0]["stats"]["live"], 100);

    provider.force_flush().unwrap();
    let received = exporter.get_finished_metrics().unwrap();
    let of = |name: &str| values(&received, name);
    let pair = |a: u64, b: u64| vec![("a".to_owned(), a), ("b".to_owned(), b)];
    // Pools of one kind, name and place are one series.
    assert_eq!(of("aquifer.memory.live"), pair(110, 1));
    assert_eq!(of("aquifer.memory.physical"), pair(220, 2));
    assert_eq!(of("aquifer.memory.allocations"), pair(14, 7));
    assert_eq!(of("aquifer.memory.host_waits"), pair(6, 3));
    assert_eq!(of("aquifer.memory.limit"), [("a".to_owned(), 5000)]);
    assert_eq!(of("aquifer.memory.largest_free"), []);
    let units: Vec<_> = received
        .iter()
        .flat_map(ResourceMetrics::scope_metrics)
        .flat_map(|scope| scope.metrics())
        .filter(|metric| metric.unit() == "By")
        .map(|metric| metric.name().to_owned())
        .collect();
    assert!(units.contains(&"aquifer.memory.live".to_owned()), "{units:?}");
    provider.shutdown().unwrap();
    drop((first, second, third));
    fs::remove_dir_all(&folder).unwrap();
}
