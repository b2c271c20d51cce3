//! How a pool behaves.

use crate::{Debugging, Reclaim};
use aquifer_core::{Budget, Recorder};
use aquifer_driver::ExportTypes;
use std::{sync::Arc, time::Duration};

/// How far one stream may take over what another's cache holds, when its own has no room.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Adoption {
    /// Never. Streams that must not be ordered with each other, such as those of collectives, need this.
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
    /// What physical memory is charged to. `None`: 80 % of what the device has free when the pool is opened.
    pub budget: Option<Budget>,
    /// How far streams share.
    pub adoption: Adoption,
    /// How long an allocation that finds no room waits for queued work, at most.
    pub wait: Duration,
    /// Bytes of every physical handle; rounded up to the device's granularity. 0: from the granularity, 2 MiB as a rule,
    /// up to 64 MiB, by how much memory is left to give.
    pub handle_bytes: u64,
    /// Move free memory to where it is missing before taking more from the driver: the least memory, at the cost of
    /// about 40 µs for each handle moved.
    pub compact: bool,
    /// For whom stable blocks are made, besides this process. Set before there is memory, since no memory can be made
    /// exportable later; all others of the pool's are not.
    pub export: ExportTypes,
    /// How many streams can be leased at once.
    pub streams: u32,
    /// Each block an allocation of its own from the driver: slow, and what memory checkers can see through.
    pub bypass: bool,
    /// What is checked about blocks. Nothing, which costs nothing, unless told otherwise here or by the environment.
    pub debug: Debugging,
    /// Where every event goes.
    pub recorder: Option<Arc<Recorder>>,
    /// Asked in turn for memory when nothing in the pool makes room.
    pub reclaim: Vec<Arc<dyn Reclaim>>,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            budget: None,
            adoption: Adoption::default(),
            wait: Duration::from_secs(10),
            handle_bytes: 0,
            compact: false,
            export: ExportTypes::NONE,
            streams: aquifer_stream::DEFAULT_CAP,
            bypass: false,
            debug: Debugging::default(),
            recorder: None,
            reclaim: Vec::new(),
        }
    }
}

impl PoolConfig {
    /// The defaults under this budget.
    #[must_use]
    pub fn with_budget(budget: Budget) -> Self {
        Self { budget: Some(budget), ..Self::default() }
    }
}
