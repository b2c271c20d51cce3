//! A server that suspends its memory: between requests its weights are in pinned memory, from which
//! a checkpoint is written, and another program part uses the device.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]
#![expect(unsafe_code, reason = "promises that nobody is about to use what is parked")]

use aquifer::{Bytes, DeviceBuffer, MemoryError, Operand, Park, Request, Runtime, Tag};
use std::{env, error::Error, fs, io::Write, process, time::Instant};

const LAYERS: usize = 4;
const PARAMETERS: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().device_budget(48 << 20).or_sim().build()?;
    let pool = rt.device(0)?;
    let s = pool.stream()?;

    // What is parked together is allocated under one tag.
    let server = Tag::named("server");
    let parkable = pool.parkable(server)?;
    let mut weights = Vec::new();
    for layer in 0..LAYERS {
        let mut of_layer: DeviceBuffer<f32> = parkable.buffer(&s, PARAMETERS)?;
        let parameters = vec![layer as f32; PARAMETERS];
        s.try_scope(|c| c.upload(&parameters, &mut of_layer))?;
        weights.push(of_layer);
    }
    let addresses: Vec<u64> = weights.iter().map(|of_layer| of_layer.range().address).collect();

    // No requests for a while: park.
    let how = Park::save_in(rt.pinned_near(0).allocator());
    // SAFETY: 1. only this thread queues work for the weights, and none of them is lent. 2. their
    // addresses are not stored elsewhere.
    let parked = unsafe { pool.park(server, how) }?;
    println!("asleep: {} saved, {} released", Bytes(parked.saved), Bytes(parked.released));
    assert_eq!(s.fill(&mut weights[0], 0.0), Err(MemoryError::Parked { tag: server }));

    // Training uses nearly all of the device.
    let training = pool.alloc(&s, Request::bytes(40 << 20).tag(Tag::named("training")))?;
    match pool.resume(server, None) {
        Err(MemoryError::OutOfMemory(told)) => println!("not yet: {told}"),
        other => return Err(format!("resumed over somebody else: {other:?}").into()),
    }

    // A checkpoint is written meanwhile, from what was saved: the device is not needed for it.
    let path = env::temp_dir().join(format!("aquifer-park-{}", process::id()));
    let (mut file, mut saved) = (fs::File::create(&path)?, vec![0; size_of::<f32>() * PARAMETERS]);
    for (layer, &address) in addresses.iter().enumerate() {
        assert!(pool.read_saved(address, &mut saved), "it is parked");
        assert!(saved.chunks_exact(4).all(|bytes| bytes == (layer as f32).to_ne_bytes()));
        file.write_all(&saved)?;
    }
    println!("checkpoint of {}", Bytes(file.metadata()?.len()));
    fs::remove_file(&path)?;
    drop(training);

    // A request: resume. Everything has its old address.
    let begun = Instant::now();
    let resumed = pool.resume(server, None)?;
    println!("awake: {} restored in {:?}", Bytes(resumed.restored), begun.elapsed());
    for (layer, (of_layer, address)) in weights.iter().zip(addresses).enumerate() {
        let mut back = vec![0.0; PARAMETERS];
        s.try_scope(|c| c.download(of_layer, &mut back))?;
        assert_eq!(of_layer.range().address, address);
        assert!(back.iter().all(|&parameter| parameter == layer as f32));
    }
    Ok(())
}
