//! A server with a growing cache of keys and values for each sequence: two tenants on one device,
//! each with its own limit, and a cache whose memory is reserved by a placement.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{
    Budget, Bytes, MemoryError, PlacementRequest, Policy, Reserved, Runtime, Stream, Tenant,
};
use std::error::Error;

/// Bytes of keys and values per token, over all layers.
const TOKEN: usize = 128 << 10;
/// Maximum tokens per sequence: 512 MiB of addresses, which use no memory.
const LONGEST: usize = 4096;

/// A sequence with its cache. The address does not change while the cache grows, so kernels and
/// graphs can keep it.
struct Sequence {
    cache: Reserved<u8>,
    tokens: usize,
}

impl Sequence {
    fn begin(tenant: &Tenant, stream: &Stream) -> Result<Self, MemoryError> {
        Ok(Self { cache: tenant.reserve(stream, LONGEST * TOKEN)?, tokens: 0 })
    }

    /// Commits memory for `more` tokens and writes their keys and values. If the tenant's limit
    /// refuses it, nothing changes.
    fn append(&mut self, stream: &Stream, more: usize, value: u8) -> Result<(), MemoryError> {
        let (start, end) = (self.tokens * TOKEN, (self.tokens + more) * TOKEN);
        self.cache.commit_to(end)?;
        stream.fill(&mut self.cache.slice_mut(start..end)?, value)?;
        self.tokens += more;
        Ok(())
    }

    /// Truncates the sequence. The memory is no longer charged to the tenant. The pool can reuse it
    /// when the stream's work is complete.
    fn truncate(&mut self, tokens: usize) -> Result<(), MemoryError> {
        self.tokens = self.tokens.min(tokens);
        self.cache.decommit(self.tokens * TOKEN..LONGEST * TOKEN).map(drop)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().or_sim().build()?;
    let pool = rt.device(0)?;
    let s = pool.stream()?;

    // Live bytes of the tenants: at most 96 MiB together, in any proportion.
    let all = Budget::new("all tenants", 96 << 20);
    let a = pool.for_tenant(&all.child("tenant a", 64 << 20))?;
    let b = pool.for_tenant(&all.child("tenant b", 64 << 20))?;

    let (mut first, mut second) = (Sequence::begin(&a, &s)?, Sequence::begin(&b, &s)?);
    first.append(&s, 100, 1)?;
    second.append(&s, 300, 2)?;
    println!("tenant a has {} live, tenant b {}", Bytes(a.live()), Bytes(b.live()));

    // The error names the budget that refused. A server would evict something of that tenant, or
    // queue the request.
    let address = second.cache.address();
    let refused = second.append(&s, 300, 3);
    let Err(MemoryError::OutOfMemory(error)) = &refused else {
        return Err(format!("{refused:?}").into());
    };
    println!("{error}");
    second.truncate(50)?;
    second.append(&s, 200, 3)?;
    assert_eq!(second.cache.address(), address, "growing moves nothing");

    // Memory reserved by a placement: no other request can take it before the cache has grown into
    // it.
    let lease = rt.placer(Policy::MostFree).place(&PlacementRequest::bytes(32 << 20))?;
    let stream = lease.stream()?;
    let mut cache: Reserved<u8> = lease.reserve(&stream, LONGEST * TOKEN)?;
    cache.commit_to(100 * TOKEN)?;
    println!("{} of the lease are left", Bytes(lease.remaining()));
    Ok(())
}
