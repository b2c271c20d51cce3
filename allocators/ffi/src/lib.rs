#![doc = include_str!("../README.md")]
//!
//! # This crate
//! The header is the document: what each function does, needs and answers stands there, and only
//! what Rust adds stands here. Tests compare the two.
//!
//! | module | holds |
//! |---|---|
//! | [`status`] | the codes, and what becomes one |
//! | [`entry`] | the door: panics end here, and texts are kept for [`aq_last_error`](entry::aq_last_error) |
//! | [`runtime`] | runtimes by their numbers, in any order of destruction |
//! | `here` | what a thread knows: the way from a raw handle to a stream without a lock |
//! | [`device`] | device memory |
//! | [`stream`] | the life of foreign streams |
//! | [`facts`] | devices, limits, statistics, snapshots |
//! | [`graphs`] | memory of captured graphs, by PyTorch's names |
//! | [`pinned`] | pinned host memory |
//! | [`staging`] | pageable memory to the device and back |
//! | [`torch`] | what PyTorch's pluggable allocator calls |
//! | [`cupy`] | what CuPy's C function allocator calls |
//! | [`sim`] | the simulated device |
#![expect(non_camel_case_types, reason = "names of the C interface")]

pub mod cupy;
pub mod device;
pub mod entry;
pub mod facts;
pub mod graphs;
mod here;
pub mod pinned;
pub mod runtime;
pub mod sim;
pub mod staging;
pub mod status;
pub mod stream;
pub mod torch;
