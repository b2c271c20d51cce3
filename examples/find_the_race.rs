//! A pipeline with one missing wait, and the simulator that finds it.
//!
//! One stream fills a buffer and another one sums it up, round after round. The second waits for
//! the first. The first does not wait for the second before it refills the buffer. On a real GPU
//! this often goes unnoticed.
#![expect(clippy::print_stdout, reason = "an example shows what it found")]

use aquifer::{
    DeviceId, DeviceRange, Driver,
    error::DriverError,
    sim::{Sim, SimKernel, ViolationKind},
};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

const GPU: DeviceId = DeviceId(0);
const ROUNDS: u64 = 8;

/// Returns the sum of all rounds. With `careful` the streams wait for each other.
fn pipeline(sim: &Sim, careful: bool) -> Result<u64, DriverError> {
    let driver: Arc<dyn Driver> = sim.driver();
    let (fill, sum) = (driver.stream_create(GPU, 0)?, driver.stream_create(GPU, 0)?);
    let (filled, summed) = (driver.event_create(GPU)?, driver.event_create(GPU)?);
    let buffer = DeviceRange { device: GPU, address: driver.mem_alloc(GPU, 4096)?, bytes: 4096 };
    let total = Arc::new(AtomicU64::new(0));

    for round in 1..=ROUNDS {
        if careful {
            driver.stream_wait_event(fill, summed)?;
        }
        let kernel = SimKernel::new("fill")
            .writes(buffer, None)
            .run(move |memory| memory.write(0).fill(round as u8));
        sim.launch(fill, kernel)?;
        driver.event_record(filled, fill)?;

        driver.stream_wait_event(sum, filled)?;
        let total = Arc::clone(&total);
        let kernel = SimKernel::new("sum").reads(buffer, None).run(move |memory| {
            let sum = memory.read(0).iter().map(|&byte| u64::from(byte)).sum();
            total.fetch_add(sum, Ordering::Relaxed);
        });
        sim.launch(sum, kernel)?;
        driver.event_record(summed, sum)?;
    }
    driver.device_synchronize(GPU)?;
    Ok(total.load(Ordering::Relaxed))
}

fn main() -> Result<(), DriverError> {
    let right = 4096 * (1..=ROUNDS).sum::<u64>();

    // Each seed runs the queues in another order, as different machines and runs do. The sum is
    // wrong for some of them only.
    let mut wrong = 0;
    for seed in 0..20 {
        let sim = Sim::h200(1).seeded(seed);
        wrong += u32::from(pipeline(&sim, false)? != right);

        // The oracle finds the race for every seed.
        let found = sim.violations();
        assert_eq!(found[0].kind, ViolationKind::ReadWrite);
        if seed == 0 {
            println!("{}", found[0]);
        }
    }
    println!("{wrong} of 20 runs computed a wrong sum, and the race was found in each");

    let sim = Sim::h200(1).seeded(0);
    assert_eq!(pipeline(&sim, true)?, right);
    assert!(sim.violations().is_empty());
    println!("with the wait: {right}, and nothing to report");
    Ok(())
}
