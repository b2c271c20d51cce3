//! What `aquifer top` and `aquifer metrics` show of other processes is what these return
//! themselves.
//!
//! | module | contents |
//! |---|---|
//! | `parts` | the processes that are watched |
//! | `window` | a terminal that the program draws on |
//! | `printed` | the table and JSON |
//! | `live` | the live view: figures, keys, sizes, and how it ends |
//! | `metrics` | the text for Prometheus |
//! | `devices` | the driver's count, from a library in the place of NVML |
//! | `shared` | ledgers: of live, dead and waiting members, and damaged ones |
//! | `clients` | clients of the server, slow and hostile ones included |

#![expect(clippy::unwrap_used, reason = "a step that fails fails its test")]

mod clients;
mod devices;
mod live;
mod metrics;
mod parts;
mod printed;
mod shared;
mod window;

use aquifer_core::{Budget, DeviceId, PoolStats, Request};
use aquifer_device::{DevicePool, PoolConfig};
use aquifer_driver::sim::Sim;
use aquifer_host::{PinnedConfig, PinnedPool, kernel::Kernel, region::Host, topology::Topology};
use aquifer_status::{PoolFigures, PoolKind, PoolSlot, SlotDescription};
pub(crate) use parts::{Part, Scratch};
use parts::{say, wait_for_end, wait_for_line};

const MIB: u64 = 1 << 20;

/// What a process says of a pool, and what is compared.
fn figures(stats: &PoolStats) -> String {
    let s = stats;
    let all = [
        s.live,
        s.requested,
        s.cached,
        s.pending,
        s.physical,
        s.graphs,
        s.peak_live,
        s.peak_requested,
        s.peak_physical,
        s.blocks,
        s.allocations,
        s.frees,
        s.failures,
        s.growths,
        s.reaped,
        s.moves,
        s.adoptions,
        s.fences,
        s.stream_waits,
        s.host_waits,
    ];
    all.map(|figure| figure.to_string()).join(" ")
}

#[test]
#[ignore = "a part of the other tests, in a process of its own"]
fn device_process() {
    // Its number makes the amounts of each process different.
    let scale: u64 = std::env::var("SCALE").unwrap().parse().unwrap();
    let config = PoolConfig::with_budget(Budget::new("device", 512 * MIB));
    let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), config).unwrap();
    let stream = pool.stream().unwrap();
    let request = |bytes: u64| Request::bytes(bytes);
    let mut held = Vec::new();
    for number in 1..=10 {
        held.push(pool.alloc(&stream, request(number * scale * 100_000)).unwrap());
    }
    held.truncate(7);
    assert!(pool.alloc(&stream, request(1 << 40)).is_err());
    say(&figures(&pool.stats()));
    wait_for_line();
    // Grows for the second reading.
    held.push(pool.alloc(&stream, request(100 * MIB)).unwrap());
    say(&figures(&pool.stats()));
    wait_for_end();
}

#[test]
#[ignore = "a part of the other tests, in a process of its own"]
fn pinned_process() {
    let host = Host::new(Topology::read().unwrap(), Kernel::new());
    let budget = Budget::new("pinned", 64 * MIB);
    let pool = PinnedPool::new(&host, &budget, PinnedConfig::default()).unwrap();
    let held =
        aquifer_core::__api::api2::vec::Vec::<u8, _>::with_capacity_in(100_000, pool.allocator());
    say(&figures(&pool.stats().memory));
    wait_for_end();
    drop(held);
}

#[test]
#[ignore = "a part of the other tests, in a process of its own"]
fn gpu_process() {
    aquifer_status::start().unwrap();
    let slot = PoolSlot::open(SlotDescription {
        kind: PoolKind::Device,
        name: "a GPU".to_owned(),
        device: Some(0),
        address: std::env::var("ADDRESS").ok(),
        node: None,
    });
    let mut stats = PoolStats::default();
    (stats.live, stats.cached, stats.physical) = (512 * MIB, 512 * MIB, 1024 * MIB);
    let figures = PoolFigures { stats, ..PoolFigures::default() };
    slot.publish(|| figures);
    say("ready");
    wait_for_end();
}

/// The name of a pool that tries to command a terminal, to end its quotes, and to forge a line.
const HOSTILE: &str = "\u{1b}[31m\u{9b}2J<b>&\"}\\ 1\n# TYPE forged counter\nforged 7\r\u{202e}";

#[test]
#[ignore = "a part of the other tests, in a process of its own"]
fn hostile_process() {
    aquifer_status::start().unwrap();
    // Two pools that nothing tells apart, and one with figures beyond all others.
    let slots = [(PoolKind::Device, 3), (PoolKind::Device, 3), (PoolKind::Source, u64::MAX >> 1)]
        .map(|(kind, live)| {
            let slot = PoolSlot::open(SlotDescription {
                kind,
                name: HOSTILE.to_owned(),
                device: Some(u32::MAX - 1),
                address: Some(format!("0000:zz{HOSTILE}")),
                node: None,
            });
            let mut stats = PoolStats::default();
            (stats.live, stats.physical) = (live, live);
            let mut figures = PoolFigures::default();
            (figures.stats, figures.largest_free) = (stats, Some(u64::MAX - 1));
            slot.publish(|| figures);
            slot
        });
    say("ready");
    wait_for_end();
    drop(slots);
}
