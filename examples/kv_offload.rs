//! The keys and values of an idle sequence go to pinned memory on the NUMA node next to the device,
//! and come back to the same addresses. Another sequence uses the memory meanwhile.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{
    Budget, Bytes, MemoryError, PinnedAllocator, PinnedConfig, PinnedPool, Reserved, Runtime,
    Stream, Tenant, host::NodeId, vec::Vec,
};
use std::{env, error::Error};

/// Bytes of keys and values per token, over all layers.
const TOKEN: usize = 128 << 10;
/// Maximum tokens per sequence.
const LONGEST: usize = 1024;

/// A sequence whose cache is on the device, or on the host, never on both.
struct Sequence {
    /// Addresses that never change, so that block tables and graphs keep them.
    cache: Reserved<u8>,
    tokens: usize,
    offloaded: Option<Vec<u8, PinnedAllocator>>,
}

impl Sequence {
    fn begin(tenant: &Tenant, s: &Stream) -> Result<Self, MemoryError> {
        Ok(Self { cache: tenant.reserve(s, LONGEST * TOKEN)?, tokens: 0, offloaded: None })
    }

    fn append(&mut self, s: &Stream, more: usize, value: u8) -> Result<(), MemoryError> {
        let (start, end) = (self.tokens * TOKEN, (self.tokens + more) * TOKEN);
        self.cache.commit_to(end)?;
        s.fill(&mut self.cache.slice_mut(start..end)?, value)?;
        self.tokens += more;
        Ok(())
    }

    /// Moves the cache to the host. `copies` is a stream of its own, so that the copy runs
    /// while other sequences work. It waits by itself for this sequence's work on other streams.
    fn offload(&mut self, copies: &Stream, near: &PinnedPool) -> Result<(), Box<dyn Error>> {
        let len = self.tokens * TOKEN;
        let mut host = Vec::new_in(near.allocator());
        host.try_reserve_exact(len)?; // an error if the host has no room; `resize` would not tell
        host.resize(len, 0);
        // In a server this is `.await`, and other sequences go on.
        self.offloaded = Some(copies.download(self.cache.slice(0..len)?, host)?.wait()?);
        self.cache.decommit(0..LONGEST * TOKEN)?;
        Ok(())
    }

    /// Moves it back. If the device has no room, nothing changes, and the sequence stays on the
    /// host.
    fn restore(&mut self, copies: &Stream) -> Result<(), Box<dyn Error>> {
        let Some(host) = self.offloaded.take() else { return Ok(()) };
        let len = host.len();
        if let Err(error) = self.cache.commit_to(len) {
            self.offloaded = Some(host);
            return Err(error.into());
        }
        // The vector is the flight's, and its memory is reused when the copy is done. Later work
        // on the cache waits for the copy, on any stream.
        drop(copies.upload(host, &mut self.cache.slice_mut(0..len)?)?);
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().or_sim().build()?;
    let pool = rt.device(0)?;
    let (compute, copies) = (pool.stream()?, pool.stream()?);
    let tenant = pool.for_tenant(&Budget::new("caches", 32 << 20))?;

    // The node whose memory the device reaches fastest. Where the device's own memory is a node of
    // the host (NVLink-C2C), this is the node of the processor. The simulated device is near no
    // node. `-- 1` takes node 1 instead, to compare.
    let near = match env::args().nth(1) {
        Some(node) => {
            let config = PinnedConfig::on(NodeId(node.parse()?));
            PinnedPool::new(rt.host(), rt.pinned_near(0).budget(), config)?
        }
        None => rt.pinned_near(0).clone(),
    };
    near.warm(32 << 20)?; // pinned before the first request, since pinning stalls launches

    let (mut first, mut second) =
        (Sequence::begin(&tenant, &compute)?, Sequence::begin(&tenant, &compute)?);
    first.append(&compute, 200, 1)?; // 25 MiB of 32
    assert!(second.append(&compute, 100, 2).is_err());

    // The first sequence waits for its user.
    let address = first.cache.address();
    first.offload(&copies, &near)?;
    second.append(&compute, 100, 2)?;
    println!("{} went to the host", Bytes(near.stats().memory.live));
    for region in near.reports() {
        println!("its pages: {:?}", region.placement); // what the kernel says of them
    }
    assert!(first.restore(&copies).is_err(), "the second sequence has the memory");

    // The user is back, and the second sequence has ended.
    drop(second);
    first.restore(&copies)?;
    first.append(&compute, 1, 3)?;
    let mut back = vec![0; 201 * TOKEN];
    compute.try_scope(|c| c.download(first.cache.slice(0..back.len())?, &mut back))?;
    assert_eq!(first.cache.address(), address);
    assert!(back[..200 * TOKEN].iter().all(|&byte| byte == 1) && back[200 * TOKEN..] == [3; TOKEN]);
    println!("and back at {address:#x}, {} tokens", first.tokens);
    Ok(())
}
