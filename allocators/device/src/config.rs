//! How a pool behaves.

use crate::Debugging;
use aquifer_core::{Budget, DeviceId, MemoryError, Recorder, Result};
use aquifer_driver::{Driver, ExportTypes};
use std::{sync::Arc, time::Duration};

/// How far one stream may take over what another's cache holds, when its own has no room.
///
/// ```
/// use aquifer_device::{Adoption, DevicePool, PoolConfig};
/// use aquifer_driver::{DeviceId, sim::Sim};
/// let mut config = PoolConfig::default();
/// config.adoption = Adoption::DoneOnly;    // streams never wait for each other's frees
/// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), config)?;
/// # drop(pool);
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Adoption {
    /// Never. Streams that must not be ordered with each other, such as those of collectives, need
    /// this. What the host has seen done goes to others through the driver before a request is
    /// refused, and at once where its stream is gone.
    Never,
    /// What the host has seen done. No stream waits for another.
    DoneOnly,
    /// Also what is still in use: the taker waits for the giver, on the device.
    #[default]
    Wait,
}

/// A pool's settings.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PoolConfig {
    /// What physical memory is charged to. `None`: 80 % of what the device has free when the pool
    /// is opened.
    ///
    /// Whoever can give memory back when the pool is short of it registers there
    /// ([`Budget::on_need`]); pools do so themselves.
    pub budget: Option<Budget>,
    /// How far streams share.
    pub adoption: Adoption,
    /// How long an allocation that finds no room waits for queued work, at most.
    pub wait: Duration,
    /// Bytes of every physical handle; rounded up to the device's granularity. 0: from the
    /// granularity, 2 MiB as a rule, up to 64 MiB, by how much memory is left to give.
    pub handle_bytes: u64,
    /// Move free memory to where it is missing before taking more from the driver: the least
    /// memory, at the cost of about 40 µs for each handle moved.
    pub compact: bool,
    /// Bytes that may lie idle in the pool: what is held and not in live blocks. When a slow path
    /// of any stream has served its request, whole handles above that go back to the driver as far
    /// as their work is known to be done (`cuMemUnmap`, `cuMemRelease`): nothing blocks, and no
    /// request that a stream's cache serves looks at it.
    /// [`DevicePool::trim`](crate::DevicePool::trim) gives back as much, whatever it is told to
    /// keep, so a program without slow paths can choose the moment. What was given back so and is
    /// taken again is kept on top of it until the next trim that is asked for less than there is,
    /// so that a loop pays for it once.
    ///
    /// Devices that cannot map wait for the device when memory goes back, so there only a trim
    /// does it.
    ///
    /// `u64::MAX`, which keeps all, unless set.
    pub release_threshold: u64,
    /// Bytes taken from the driver and mapped when the pool is opened, at the driver's price of
    /// about 1 ms a GiB and more; see [`DevicePool::warm`](crate::DevicePool::warm), which does
    /// the same later and says what may take them.
    ///
    /// At most the budget's limit and the release threshold; only on devices that can map, and not
    /// beside bypass. 0 unless set.
    pub warm_reserve: u64,
    /// Bytes that may lie idle in the cache of one stream. When a slow path of any stream finds
    /// more there, free ranges whose work is known to be done go to all streams, largest first:
    /// their next blocks there come from a slow path, which makes no memory call. No driver call
    /// and no wait; no request that a stream's cache serves looks at it.
    ///
    /// Only on devices that can map: elsewhere other streams take whole segments, or nothing.
    /// `u64::MAX`, which is no cap, unless set.
    pub stream_cache: u64,
    /// Other devices whose kernels may touch the pool's memory: each mapping is opened to them.
    /// Copies between devices need no such thing ([`Stream::copy`](aquifer_stream::Stream::copy)).
    ///
    /// It is dear. `cuMemSetAccess` takes about 1 ms for each peer, whatever a handle's size: on
    /// four H200s 0.05 ms for a handle of 2 MiB without peers, 1.1, 2.0 and 2.9 with one, two and
    /// three; of 64 MiB 0.15, 1.2, 2.1 and 3.2. Growth and moves cost that much more, so
    /// [`handle_bytes`](Self::handle_bytes) should be large beside it, or what peers touch be
    /// [stable](crate::DevicePool::alloc_stable) memory of a pool of its own.
    ///
    /// Only on devices that can map, and not beside bypass; each must name the pool's device among
    /// its [peers](aquifer_driver::DeviceInfo::peers). None unless set.
    pub peers: Vec<DeviceId>,
    /// For whom stable blocks are made, besides this process. Set before there is memory, since no
    /// memory can be made exportable later; all others of the pool's are not.
    pub export: ExportTypes,
    /// How many streams can be leased at once.
    pub streams: u32,
    /// Each block an allocation of its own from the driver: slow, and what memory checkers can see
    /// through.
    pub bypass: bool,
    /// What is checked about blocks. Nothing, which costs nothing, unless told otherwise here or
    /// by the environment.
    pub debug: Debugging,
    /// Where every event goes.
    pub recorder: Option<Arc<Recorder>>,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            budget: None,
            adoption: Adoption::default(),
            wait: Duration::from_secs(10),
            handle_bytes: 0,
            compact: false,
            release_threshold: u64::MAX,
            warm_reserve: 0,
            stream_cache: u64::MAX,
            peers: Vec::new(),
            export: ExportTypes::NONE,
            streams: aquifer_stream::DEFAULT_CAP,
            bypass: false,
            debug: Debugging::default(),
            recorder: None,
        }
    }
}

impl PoolConfig {
    /// The defaults under this budget.
    #[must_use]
    pub fn with_budget(budget: Budget) -> Self {
        Self { budget: Some(budget), ..Self::default() }
    }

    /// Whom mappings are opened to: the pool's own device first.
    ///
    /// # Errors
    /// A peer that is not there or could not reach it, or peers where memory is not mapped.
    pub(crate) fn reach(
        &self,
        driver: &dyn Driver,
        device: DeviceId,
        maps: bool,
    ) -> Result<Arc<[DeviceId]>> {
        let mut reach = vec![device];
        for &peer in &self.peers {
            if !maps {
                return Err(MemoryError::Unsupported {
                    feature: "virtual memory management (cuMemMap)",
                });
            }
            let bad = |expected| {
                let (name, value) = ("peers", peer.to_string());
                Err(MemoryError::BadSetting { name, value, expected })
            };
            if self.bypass {
                return bad("none beside bypass, where every block is an allocation of its own");
            }
            let info = driver.device_info(peer).map_err(|e| MemoryError::driver(peer, e))?;
            if peer != device && !info.peers.contains(&device) {
                return bad("devices whose kernels can reach the pool's");
            }
            if !reach.contains(&peer) {
                reach.push(peer);
            }
        }
        Ok(reach.into())
    }

    /// Refuses settings that contradict each other, the budget's limit, or what the device can.
    pub(crate) fn check_retention(&self, limit: u64, maps: bool) -> Result<()> {
        if (self.warm_reserve > 0 || self.stream_cache < u64::MAX) && !maps {
            return Err(MemoryError::Unsupported {
                feature: "virtual memory management (cuMemMap)",
            });
        }
        let expected = match self.warm_reserve {
            0 => return Ok(()),
            _ if self.bypass => "0 beside bypass, where every block is an allocation of its own",
            warm if warm > limit => "at most the limit of the budget",
            warm if warm > self.release_threshold => "at most release_threshold",
            _ => return Ok(()),
        };
        Err(MemoryError::BadSetting {
            name: "warm_reserve",
            value: self.warm_reserve.to_string(),
            expected,
        })
    }
}
