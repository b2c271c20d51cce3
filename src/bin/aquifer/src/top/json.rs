//! One reading as JSON. The guide's page on watching documents the fields.

use super::{
    monitor::Monitor,
    reading::Rates,
    shared::SharedMemories,
    sums::{DeviceSum, PoolSum, ProcessSum},
};
use aquifer_status::{PoolStatus, ProcessStatus};
use serde_json::{Map, Value, json};

/// Returns the last reading.
pub(super) fn text(monitor: &Monitor) -> String {
    let statuses = monitor.last.iter().flat_map(|reading| &reading.processes);
    let processes: Vec<Value> =
        monitor.processes.iter().zip(statuses).map(|(sum, status)| process(sum, status)).collect();
    let errors = monitor.last.iter().flat_map(|reading| &reading.errors);
    let shared = monitor.last.as_ref().map(|reading| &reading.shared);
    let errors = errors.chain(shared.iter().flat_map(|shared| &shared.errors));
    let value = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "taken_ns": monitor.last.as_ref().map(|reading| reading.taken_ns),
        "folder": monitor.folder().to_string_lossy(),
        "seconds_between_readings": monitor.seconds,
        "driver": monitor.no_driver().map_or(json!("NVML"), |_| Value::Null),
        "devices": monitor.devices.iter().map(device).collect::<Vec<_>>(),
        "processes": processes,
        "shared": shared.map(SharedMemories::as_json),
        "errors": errors.chain(&monitor.sweep_error).collect::<Vec<_>>(),
        "dead": monitor.hidden_dead,
        "swept": monitor.swept,
    });
    // Formatting of a value cannot fail.
    serde_json::to_string_pretty(&value).unwrap_or_default()
}

fn device(device: &DeviceSum) -> Value {
    json!({
        "address": device.address,
        "name": device.name,
        "processes": device.processes,
        "live": device.sum.live,
        "cached": device.sum.cached,
        "pending": device.sum.pending,
        "physical": device.sum.physical,
        "driver_used": device.driver_used,
        "driver_total": device.driver_total,
        "outside": device.outside(),
    })
}

fn process(sum: &ProcessSum, status: &ProcessStatus) -> Value {
    let pools = status.pools.iter().zip(&sum.rates);
    json!({
        "pid": status.process,
        "command": status.command,
        "state": if status.is_alive { "alive" } else { "dead" },
        "library_version": status.version,
        "started_ns": status.started_ns,
        "device": total(&sum.device),
        "host": total(&sum.host),
        "pools": pools.map(|(status, rates)| pool(status, *rates)).collect::<Vec<_>>(),
        "faults": status.faults.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}

fn total(sum: &PoolSum) -> Value {
    json!({
        "pools": sum.pools,
        "live": sum.live,
        "requested": sum.requested,
        "cached": sum.cached,
        "pending": sum.pending,
        "physical": sum.physical,
        "peak_physical": sum.peak,
    })
}

/// The fields of the pool and of its statistics, and its rates.
fn pool(pool: &PoolStatus, rates: Option<Rates>) -> Value {
    let mut fields = match serde_json::to_value(pool) {
        Ok(Value::Object(fields)) => fields,
        // A pool consists of numbers and texts.
        _ => Map::new(),
    };
    if let Some(Value::Object(stats)) = fields.remove("stats") {
        fields.extend(stats);
    }
    fields.insert("growths_per_s".into(), json!(rates.map(|rates| rates.growths)));
    fields.insert("moves_per_s".into(), json!(rates.map(|rates| rates.moves)));
    fields.insert("waits_per_s".into(), json!(rates.map(|rates| rates.waits)));
    Value::Object(fields)
}
