//! Work that is captured once and launched many times, with its own memory, while other work
//! continues.
//!
//! Runs on the first GPU. Without one it uses a simulated GPU that checks each access.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]
#![expect(unsafe_code, reason = "promises what the captured work touches")]

use aquifer::{DeviceBuffer, MemoryError, Runtime, sim::Sim};

const BYTES: usize = 1 << 20;

fn main() -> Result<(), MemoryError> {
    let machine = Runtime::builder().build()?;
    let sim = Sim::h200(1);
    let rt = if machine.devices().is_empty() { Runtime::on(sim.driver())? } else { machine };
    let pool = rt.device(0)?;
    let (s, u) = (pool.stream()?, pool.stream()?);
    let graphs = pool.graph_pool()?;

    // SAFETY: 1. and 2. the work touches blocks of the graph pool only.
    let (graph, (mut input, output)) = unsafe {
        graphs.capture(&s, |s| {
            let input: DeviceBuffer<u8> = pool.buffer(s, BYTES)?;
            let mut between: DeviceBuffer<u8> = pool.buffer(s, BYTES)?;
            s.copy(&input, &mut between)?;
            let mut output: DeviceBuffer<u8> = pool.buffer(s, BYTES)?;
            s.copy(&between, &mut output)?;
            Ok((input, output)) // `between` is freed, but its memory stays with the graph
        })
    }?;

    let mut back = vec![0; BYTES];
    for round in 0..100u8 {
        // Each call waits for what it needs: the fill for the last launch, the launch for the fill,
        // the copy for the launch.
        u.fill(&mut input, round)?;
        graph.launch(&s)?;
        // An ordinary block. No launch writes it.
        let mut other: DeviceBuffer<u8> = pool.buffer(&u, BYTES)?;
        u.fill(&mut other, 0xff)?;
        u.try_scope(|c| c.download(&output, &mut back))?;
        assert!(back.iter().all(|&byte| byte == round));
        u.try_scope(|c| c.download(&other, &mut back))?;
        assert!(back.iter().all(|&byte| byte == 0xff));
    }
    println!("a hundred launches over {} bytes of a graph's own", graphs.stats().physical);

    drop((graph, graphs, input, output));
    s.synchronize()?;
    pool.trim(0)?;
    println!("{} of them are left when it is gone", pool.stats().graphs);
    assert!(sim.violations().is_empty(), "{}", sim.violations()[0]);
    Ok(())
}
