#![doc = include_str!("guide/guide.md")]

#[doc = include_str!("guide/first_steps.md")]
pub mod first_steps {}

#[doc = include_str!("guide/streams_and_kernels.md")]
pub mod streams_and_kernels {}

#[doc = include_str!("guide/graphs.md")]
pub mod graphs {}

#[doc = include_str!("guide/host_memory.md")]
pub mod host_memory {}

#[doc = include_str!("guide/collections_and_arenas.md")]
pub mod collections_and_arenas {}

#[doc = include_str!("guide/limits.md")]
pub mod limits {}

#[doc = include_str!("guide/without_a_gpu.md")]
pub mod without_a_gpu {}

#[doc = include_str!("guide/watching.md")]
pub mod watching {}

#[doc = include_str!("guide/tuning.md")]
pub mod tuning {}

#[doc = include_str!("guide/environment.md")]
pub mod environment {}

#[doc = include_str!("guide/safety.md")]
pub mod safety {}

#[doc = include_str!("guide/c_and_python.md")]
pub mod c_and_python {}

#[doc = include_str!("guide/from_cudarc.md")]
pub mod from_cudarc {}

#[doc = include_str!("guide/from_rmm.md")]
pub mod from_rmm {}

#[doc = include_str!("guide/from_pytorch.md")]
pub mod from_pytorch {}

pub mod inside;
