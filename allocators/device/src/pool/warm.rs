//! Memory that is mapped ahead of need.

use crate::{DevicePool, pool_core::PoolCore};
use aquifer_core::{MemoryError, Result, Tag};
use aquifer_driver::site;

impl DevicePool {
    /// Takes memory from the driver and maps it (`cuMemCreate`, `cuMemMap`, `cuMemSetAccess`) until
    /// the caches hold `bytes`, rounded up to handles. The first stream that needs it gets it.
    /// Returns the bytes taken. Blocks only for the driver's own time.
    ///
    /// From now on neither a trim nor the [release threshold](crate::PoolConfig::release_threshold)
    /// releases memory below `bytes` in the caches, in use or idle. This replaces an earlier value,
    /// and 0 removes the reserve. Only these may take it: a request of this pool, for a block or
    /// for stable or reserved memory, for which no other room can be made; another pool under the
    /// same budget; and closing the pool. It is not refilled automatically.
    ///
    /// ```
    /// use aquifer::{DeviceId, DevicePool, PoolConfig, Request, driver::Call, sim::Sim};
    /// let sim = Sim::h200(1);
    /// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
    /// pool.warm(1 << 30)?;
    /// let made = sim.driver().calls().get(Call::HandleCreate);
    /// let block = pool.alloc(&pool.stream()?, Request::bytes(1 << 30))?;
    /// assert_eq!(sim.driver().calls().get(Call::HandleCreate), made);
    /// drop(block);
    /// pool.trim(0)?;
    /// assert_eq!(pool.stats().physical, 1 << 30);
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`] on devices without virtual memory mapping, and in bypass mode;
    /// [`MemoryError::OutOfMemory`]; the driver's. In each case the pool holds as much as before,
    /// and the reserve is unchanged.
    #[track_caller]
    pub fn warm(&self, bytes: u64) -> Result<u64> {
        let _site = site::enter();
        let taken = self.core().warm(bytes);
        self.core().publish();
        taken
    }
}

impl PoolCore {
    /// As [`DevicePool::warm`].
    pub(crate) fn warm(&self, bytes: u64) -> Result<u64> {
        let taken = if bytes == 0 {
            0
        } else if !self.config.bypass {
            if let Some(error) = self.refuse_oversized(bytes, Tag::NONE) {
                return Err(error);
            }
            self.memory.warm(bytes).map_err(|error| self.explain_refusal(bytes, error))?
        } else {
            return Err(MemoryError::Unsupported {
                feature: "a warm reserve (cuMemMap, and no bypass)",
            });
        };
        self.retention.set_reserve(bytes);
        Ok(taken)
    }
}
