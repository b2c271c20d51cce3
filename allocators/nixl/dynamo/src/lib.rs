//! Memory of aquifer as storage of dynamo-memory, which Dynamo's block manager takes.
//!
//! ```no_run
//! use aquifer::{Request, Runtime};
//! use aquifer_dynamo::FixedStorage;
//! use aquifer_nixl::PinnedRange;
//! use dynamo_memory::{Buffer, nixl::{NixlAgent, register_with_nixl}};
//! use std::sync::Arc;
//! let runtime = Runtime::builder().build()?;
//! let pinned = FixedStorage::new(Arc::new(PinnedRange::new(runtime.pinned_near(0), 1 << 30)?));
//! let (pool, stream) = (runtime.device(0)?, runtime.device(0)?.stream()?);
//! let block = pool.alloc_stable_legacy(&stream, Request::bytes(1 << 30))?;
//! let device = FixedStorage::new(Arc::new(block.register()));
//! let agent = NixlAgent::with_backends("worker", &["UCX"])?;
//! let registered = register_with_nixl(device, &agent, None).map_err(|_| "not registered")?;
//! let buffer = Buffer::new(pinned);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A workspace of its own, because dynamo-memory pins nixl-sys and cudarc to one version each. It
//! builds with libclang, which nixl-sys needs.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

use aquifer_nixl::{FixedMemory, FixedRange, MemoryPlace};
use dynamo_memory::{
    MemoryDescriptor, StorageKind,
    nixl::{MemType, NixlCompatible, NixlDescriptor},
};
use std::{any::Any, fmt, sync::Arc};

/// Storage over memory that does not move: a `PinnedRange`, or the registration of a stable block.
/// A clone is the same storage. The memory goes with the last one.
#[derive(Clone)]
pub struct FixedStorage {
    memory: Arc<dyn FixedMemory>,
}

impl FixedStorage {
    /// Makes storage of memory.
    #[must_use]
    pub fn new(memory: Arc<dyn FixedMemory>) -> Self {
        Self { memory }
    }

    fn range(&self) -> FixedRange {
        self.memory.fixed_range()
    }

    /// Returns the memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<dyn FixedMemory> {
        &self.memory
    }
}

impl MemoryDescriptor for FixedStorage {
    fn addr(&self) -> usize {
        self.range().address as usize
    }

    fn size(&self) -> usize {
        self.range().bytes as usize
    }

    fn storage_kind(&self) -> StorageKind {
        match self.range().place {
            MemoryPlace::Host => StorageKind::Pinned,
            MemoryPlace::Device(device) => StorageKind::Device(device),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    /// Returns `None`: what is registered is `dynamo_memory::nixl::NixlRegistered`.
    fn nixl_descriptor(&self) -> Option<NixlDescriptor> {
        None
    }
}

impl NixlCompatible for FixedStorage {
    fn nixl_params(&self) -> (*const u8, usize, MemType, u64) {
        let (kind, device) = match self.range().place {
            MemoryPlace::Host => (MemType::Dram, 0),
            MemoryPlace::Device(device) => (MemType::Vram, u64::from(device)),
        };
        (std::ptr::with_exposed_provenance(self.addr()), self.size(), kind, device)
    }
}

impl fmt::Debug for FixedStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedStorage").field("range", &self.range()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer::{Request, Runtime, sim::Sim};
    use aquifer_nixl::PinnedRange;
    use dynamo_memory::{
        Buffer,
        nixl::{NixlAgent, RegisteredView, register_with_nixl},
    };
    use std::error::Error;

    type Tested = Result<(), Box<dyn Error>>;

    #[test]
    fn pinned_memory_is_pinned_storage_and_goes_with_the_last_buffer() -> Tested {
        let runtime = Runtime::on(Sim::h200(1).driver())?;
        let pool = runtime.pinned_near(0);
        let range = PinnedRange::new(pool, 1 << 20)?;
        let address = range.as_ptr() as usize;
        let buffer = Buffer::new(FixedStorage::new(Arc::new(range)));
        assert_eq!((buffer.addr(), buffer.size()), (address, 1 << 20));
        assert_eq!(buffer.storage_kind(), StorageKind::Pinned);
        assert!(buffer.nixl_descriptor().is_none());
        let second = buffer.clone();
        drop(buffer);
        assert_eq!(pool.stats().memory.live, 1 << 20);
        drop(second);
        assert_eq!(pool.stats().memory.live, 0);
        Ok(())
    }

    #[test]
    fn a_stable_block_is_device_storage_and_stays_after_its_free() -> Tested {
        let runtime = Runtime::on(Sim::h200(2).driver())?;
        let pool = runtime.device(1)?;
        let block = pool.alloc_stable(&pool.stream()?, Request::bytes(1 << 21))?;
        let storage = FixedStorage::new(Arc::new(block.register()));
        assert_eq!(storage.storage_kind(), StorageKind::Device(1));
        let (_, bytes, kind, device) = storage.nixl_params();
        assert_eq!((storage.addr() as u64, bytes), (block.address(), 1 << 21));
        assert!(matches!(kind, MemType::Vram) && device == 1);
        drop(block);
        pool.trim(0)?;
        assert_eq!(pool.stats().physical, 1 << 21);
        drop(storage);
        pool.trim(0)?;
        assert_eq!(pool.stats().physical, 0);
        Ok(())
    }

    /// Needs NIXL: `ci/nixl` runs it.
    #[test]
    #[ignore = "needs NIXL, as ci/nixl has it"]
    fn dynamo_registers_pinned_storage() -> Tested {
        let runtime = Runtime::on(Sim::h200(1).driver())?;
        let pool = runtime.pinned_near(0);
        let agent = NixlAgent::with_backends("worker", &["UCX"])?;
        let storage = FixedStorage::new(Arc::new(PinnedRange::new(pool, 1 << 20)?));
        let address = storage.addr() as u64;
        let registered = register_with_nixl(storage, &agent, None).map_err(|_| "not registered")?;
        assert!(registered.is_registered());
        assert_eq!((registered.descriptor().addr, registered.agent_name()), (address, "worker"));
        assert!(!agent.get_local_md()?.is_empty());
        drop(registered);
        assert_eq!(pool.stats().memory.live, 0);
        Ok(())
    }
}
