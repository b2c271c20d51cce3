//! Many `LoRA` adapters, of which the device keeps as many as it has room for. All of them are in
//! pinned memory. Those on the device are given up, the least recently used first, when a batch's
//! cache of keys and values needs the memory: [`Budget::on_need`].
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{
    Budget, Bytes, DeviceBuffer, MemoryError, PinnedBuf, Request, Runtime, Stream, Tag, Tenant,
    budget::{Offer, Reclaim},
};
use std::{
    error::Error,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

const ADAPTERS: usize = 64;
/// Numbers per adapter, 1 MiB.
const LEN: usize = 1 << 18;

type OnDevice = Arc<DeviceBuffer<f32>>;

struct Adapters {
    /// All adapters. They never change, so that nothing has to be copied back.
    host: Vec<PinnedBuf<f32>>,
    /// Those on the device, the least recently used first. The lock is never held over an
    /// allocation or a copy: an allocation calls [`Reclaim::reclaim`], which takes it.
    resident: Mutex<Vec<(usize, OnDevice)>>,
}

impl Adapters {
    fn resident(&self) -> MutexGuard<'_, Vec<(usize, OnDevice)>> {
        self.resident.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an adapter for a batch, which keeps it on the device by holding it.
    fn load(&self, id: usize, tenant: &Tenant, s: &Stream) -> Result<OnDevice, MemoryError> {
        {
            let mut resident = self.resident();
            if let Some(at) = resident.iter().position(|(other, _)| *other == id) {
                resident[at..].rotate_left(1); // the most recently used one is the last
                return Ok(resident[resident.len() - 1].1.clone());
            }
        }
        let mut x: DeviceBuffer<f32> = tenant.buffer(s, LEN)?; // may call `reclaim`
        s.try_scope(|copies| copies.upload(&self.host[id], &mut x))?;
        let adapter = Arc::new(x);
        self.resident().push((id, adapter.clone()));
        Ok(adapter)
    }
}

/// Whether no batch uses the adapter.
fn is_idle((_, adapter): &(usize, OnDevice)) -> bool {
    Arc::strong_count(adapter) == 1
}

impl Reclaim for Adapters {
    fn name(&self) -> &'static str {
        "idle LoRA adapters"
    }

    /// Asked before anything is reclaimed. The reclaimer that costs least is called first.
    fn offer(&self) -> Offer {
        let idle = self.resident().iter().filter(|one| is_idle(one)).count() as u64;
        // What it takes to load them again, at 40 GB/s.
        Offer { bytes: idle * 4 * LEN as u64, cost: Duration::from_micros(26) * idle as u32 }
    }

    fn reclaim(&self, bytes: u64, _: Option<Instant>) {
        let mut count = bytes.div_ceil(4 * LEN as u64);
        // Freed in stream order: work that is queued already may still use them.
        self.resident().retain(|one| {
            let keep = count == 0 || !is_idle(one);
            count -= u64::from(!keep);
            keep
        });
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().or_sim().build()?;
    let s = rt.device(0)?.stream()?;
    // Live bytes of adapters and caches together.
    let budget = Budget::new("adapters and caches", 32 << 20);
    let tenant = rt.device(0)?.for_tenant(&budget)?;

    let mut host = Vec::new();
    for id in 0..ADAPTERS {
        let mut adapter = rt.pinned_near(0).buffer(LEN)?;
        adapter.fill(id as f32);
        host.push(adapter);
    }
    let adapters = Arc::new(Adapters { host, resident: Mutex::default() });
    let _registration = budget.on_need(&adapters); // until it is dropped

    // Requests for all adapters, one after another: 64 MiB pass through 32.
    for id in 0..ADAPTERS {
        let adapter = adapters.load(id, &tenant, &s)?;
        let mut first = [0.0];
        s.try_scope(|copies| copies.download(adapter.slice(0..1)?, &mut first))?;
        assert_eq!(first, [id as f32]);
        assert!(budget.used() <= 32 << 20);
    }
    println!("{} adapters are on the device", adapters.resident().len());

    // A batch that uses two of them needs a large cache. Idle adapters go, and those two stay.
    let batch = [adapters.load(40, &tenant, &s)?, adapters.load(63, &tenant, &s)?];
    let kv = tenant.alloc(&s, Request::bytes(28 << 20).tag(Tag::named("kv")))?;
    let left: Vec<usize> = adapters.resident().iter().map(|(id, _)| *id).collect();
    println!("{} of cache next to adapters {left:?}", Bytes(kv.bytes()));
    assert!(left.len() <= 4 && left.ends_with(&[40, 63]));

    // A cache that fits only without the adapters of the batch is refused as long as it runs.
    drop(kv);
    assert!(tenant.alloc(&s, Request::bytes(31 << 20)).is_err());
    drop(batch);
    assert!(tenant.alloc(&s, Request::bytes(31 << 20)).is_ok());
    println!("{} left after a cache of 31 MiB", adapters.resident().len());
    Ok(())
}
