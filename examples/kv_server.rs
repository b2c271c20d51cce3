//! A server that keeps a growing cache of keys and values for each sequence: two tenants on one
//! device, each under a limit of its own, and one whose memory a placement has set aside.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{Budget, Bytes, MemoryError, Place, Policy, Reserved, Runtime, Stream, Tenant};
use std::error::Error;

/// Bytes of keys and values that one token takes, in all layers together.
const TOKEN: usize = 128 << 10;
/// Tokens that a sequence may have at most: addresses for 512 MiB, which cost no memory.
const LONGEST: usize = 4096;

/// A sequence with its cache. The address stays the same while the cache grows, so kernels and
/// graphs keep it.
struct Sequence {
    cache: Reserved<u8>,
    tokens: usize,
}

impl Sequence {
    fn begin(tenant: &Tenant, stream: &Stream) -> Result<Self, MemoryError> {
        Ok(Self { cache: tenant.reserve(stream, LONGEST * TOKEN)?, tokens: 0 })
    }

    /// Makes room for `more` tokens and writes their keys and values. If the tenant's limit
    /// refuses, nothing has changed.
    fn append(&mut self, stream: &Stream, more: usize, value: u8) -> Result<(), MemoryError> {
        let (start, end) = (self.tokens * TOKEN, (self.tokens + more) * TOKEN);
        self.cache.commit_to(end)?;
        stream.fill(&mut self.cache.slice_mut(start..end)?, value)?;
        self.tokens += more;
        Ok(())
    }

    /// Cuts the sequence back. The memory is the tenant's no more; the pool has it again when the
    /// stream is done with it.
    fn truncate(&mut self, tokens: usize) -> Result<(), MemoryError> {
        self.tokens = self.tokens.min(tokens);
        self.cache.decommit(self.tokens * TOKEN..LONGEST * TOKEN).map(drop)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().or_sim().build()?;
    let pool = rt.device(0)?;
    let s = pool.stream()?;

    // Live bytes of the tenants: together no more than 96 MiB, however they share them.
    let all = Budget::new("all tenants", 96 << 20);
    let a = pool.for_tenant(&all.child("tenant a", 64 << 20))?;
    let b = pool.for_tenant(&all.child("tenant b", 64 << 20))?;

    let (mut first, mut second) = (Sequence::begin(&a, &s)?, Sequence::begin(&b, &s)?);
    first.append(&s, 100, 1)?;
    second.append(&s, 300, 2)?;
    println!("tenant a has {} live, tenant b {}", Bytes(a.live()), Bytes(b.live()));

    // A refusal names the budget that stood in the way. A server evicts something of that tenant's,
    // or lets the request wait.
    let address = second.cache.address();
    let refused = second.append(&s, 300, 3);
    let Err(MemoryError::OutOfMemory(error)) = &refused else {
        return Err(format!("{refused:?}").into());
    };
    println!("{error}");
    second.truncate(50)?;
    second.append(&s, 200, 3)?;
    assert_eq!(second.cache.address(), address, "growing moves nothing");

    // Memory that a placement has set aside: no other request can take it before the cache has
    // grown into it.
    let lease = rt.placer(Policy::MostFree).place(&Place::bytes(32 << 20))?;
    let stream = lease.stream()?;
    let mut cache: Reserved<u8> = lease.reserve(&stream, LONGEST * TOKEN)?;
    cache.commit_to(100 * TOKEN)?;
    println!("{} of the lease are left", Bytes(lease.remaining()));
    Ok(())
}
