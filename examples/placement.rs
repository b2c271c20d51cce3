//! A request is placed on the device with the most free memory, which holds the bytes until they
//! are used.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{Bytes, DeviceBuffer, PlacementRequest, Policy, Runtime, sim::Sim};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    // Four simulated devices, so that there is a choice.
    let rt = Runtime::on(Sim::h200(4).symbolic().driver())?;
    let placer = rt.placer(Policy::MostFree);

    let lease = placer.place(&PlacementRequest::bytes(6 << 30))?;
    let w: DeviceBuffer<u8> = lease.buffer(&lease.stream()?, 1 << 30)?;
    println!("{} of {} drawn on {}", Bytes(w.len() as u64), Bytes(6 << 30), lease.device());

    // The first device now has less memory left than the others, so the next request is placed
    // elsewhere.
    let next = placer.place(&PlacementRequest::bytes(6 << 30))?;
    assert_ne!(lease.device(), next.device());
    Ok(())
}
