//! The stream code of a program on a machine without a GPU, with every access checked.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{DeviceBuffer, MemoryError, Runtime, sim::Sim};

/// The same code as in production on a GPU: one stream fills, the other copies the result.
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
    // Each seed runs the queues in another order, as different machines and runs do.
    for seed in 0..20 {
        let sim = Sim::h200(1).seeded(seed);
        my_code(&Runtime::on(sim.driver())?)?;
        assert!(sim.violations().is_empty(), "{}", sim.violations()[0]);
    }
    println!("twenty orders of two queues, and no access that nobody ordered");
    Ok(())
}
