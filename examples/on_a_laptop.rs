//! A program's own stream code on a machine without a GPU, where each access is checked.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{DeviceBuffer, MemoryError, Runtime, sim::Sim};

/// What runs on the GPU in production, without a change: one stream fills, the other takes a copy
/// of it.
fn my_code(rt: &Runtime) -> Result<u8, MemoryError> {
    let pool = rt.device(0)?;
    let (filling, copying) = (pool.stream()?, pool.stream()?);
    let mut last = 0;
    for round in 1..=8u8 {
        let mut a: DeviceBuffer<u8> = pool.buffer(&filling, 1 << 16)?;
        let mut b: DeviceBuffer<u8> = pool.buffer(&copying, 1 << 16)?;
        filling.fill(&mut a, round)?;
        copying.copy(&a, &mut b)?;
        drop(a);

        let mut back = [0; 1 << 16];
        copying.try_scope(|c| c.download(&b, &mut back))?;
        assert!(back.iter().all(|&byte| byte == round));
        last = back[0];
    }
    Ok(last)
}

fn main() -> Result<(), MemoryError> {
    // Each seed lets the queues run in another order, as machines and days do.
    for seed in 0..20 {
        let sim = Sim::h200(1).seeded(seed);
        my_code(&Runtime::on(sim.driver())?)?;
        assert!(sim.violations().is_empty(), "{}", sim.violations()[0]);
    }
    println!("twenty orders of two queues, and no access that nobody ordered");
    Ok(())
}
