#![doc = include_str!("inside/inside.md")]

#[doc = include_str!("inside/device_pool.md")]
pub mod device_pool {}

#[doc = include_str!("inside/moves.md")]
pub mod moves {}

#[doc = include_str!("inside/thresholds.md")]
pub mod thresholds {}

#[doc = include_str!("inside/stable_and_reserved.md")]
pub mod stable_and_reserved {}

#[doc = include_str!("inside/pinned_pool.md")]
pub mod pinned_pool {}

#[doc = include_str!("inside/staging.md")]
pub mod staging {}

#[doc = include_str!("inside/budget_and_pressure.md")]
pub mod budget_and_pressure {}

#[doc = include_str!("inside/placement.md")]
pub mod placement {}

#[doc = include_str!("inside/arenas_and_frames.md")]
pub mod arenas_and_frames {}

#[doc = include_str!("inside/global_allocator.md")]
pub mod global_allocator {}

#[doc = include_str!("inside/heap_engine.md")]
pub mod heap_engine {}

#[doc = include_str!("inside/simulator.md")]
pub mod simulator {}
