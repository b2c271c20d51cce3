//! A model that is too large for one device. Its shards are placed on devices that can access each
//! other's memory, all or none.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{
    Bytes, DeviceBuffer, Group, PlaceError, PlacementRequest, Policy, Runtime, sim::Sim,
};
use std::error::Error;

const SHARD: u64 = 40 << 30;

fn main() -> Result<(), Box<dyn Error>> {
    // Eight simulated devices with 100 GiB each.
    let sim = Sim::h200(8).symbolic();
    let rt = Runtime::builder().driver(sim.driver()).device_budget(100 << 30).build()?;
    let placer = rt.placer(Policy::MostFree);

    // Four shards, each on its own device. Every device can access every other's memory.
    let model = Group::of(4, PlacementRequest::bytes(SHARD).min_compute((9, 0))).on_peers();
    let shards = placer.place_group(&model)?;
    for (number, shard) in shards.iter().enumerate() {
        let weights: DeviceBuffer<f32> = shard.buffer(&shard.stream()?, 1 << 30)?;
        println!("shard {number}: {} on {}", Bytes(4 * weights.len() as u64), shard.device());
    }

    // One of the devices is taken out of service: nothing new is placed there, and the model keeps
    // running.
    placer.drain(shards[0].device())?;
    let second = placer.place_group(&Group::of(7, PlacementRequest::bytes(SHARD)))?;
    assert!(second.iter().all(|shard| shard.device() != shards[0].device()));

    // A group that does not fit fails as a whole. The error lists every device with its reason.
    match placer.place_group(&Group::of(5, PlacementRequest::bytes(SHARD))) {
        Err(PlaceError::Nowhere(nowhere)) => println!("{nowhere}"),
        other => println!("{other:?}"),
    }
    drop(shards);
    Ok(())
}
