#![doc = include_str!("../README.md")]
//!
//! # This crate
//! The header documents what each function does, requires and returns. The comments here add only
//! what concerns Rust. Tests compare header and sources.
//!
//! | module | contents |
//! |---|---|
//! | [`status`] | the status codes, and their errors |
//! | [`entry`] | the entry of each call: panics, error texts |
//! | `table` | runtimes by number, destroyed in any order |
//! | `thread_state` | thread-local state: finds the stream of a raw handle without a lock |
//! | [`runtime`] | creating and destroying runtimes |
//! | [`device`] | device memory, and the lifetime of foreign streams |
//! | [`facts`] | devices, limits, statistics, snapshots |
//! | `process` | the runtime that PyTorch and CuPy use, and the devices of its addresses |
//! | [`elastic`] | addresses whose pages get memory and lose it |
//! | [`graphs`] | memory of captured graphs, by PyTorch's names |
//! | [`pinned`] | pinned host memory |
//! | [`staging`] | copies of pageable memory to and from the device |
//! | [`sharing`] | blocks of PyTorch for other processes |
//! | [`torch`] | the functions for PyTorch's pluggable allocator, and for CuPy's C function allocator |
//! | [`fenced`] | device memory for callers that name no stream: ONNX Runtime, numba |
//! | [`region`] | a thread's tag for memory that can be given back |
//! | [`registered`] | memory that a transport registers, for MemPools |
//! | [`ledger`] | claims of memory that processes share |
//! | [`sleep`] | memory that is given back while a process sleeps |
//! | [`backup`] | where its contents are kept, and how they are read |
//! | [`sim`] | the simulated device |
#![expect(non_camel_case_types, reason = "names of the C interface")]

pub mod backup;
pub mod device;
pub mod elastic;
pub mod entry;
pub mod facts;
pub mod fenced;
pub mod graphs;
pub mod ledger;
pub mod pinned;
mod process;
pub mod region;
pub mod registered;
pub mod runtime;
pub mod sharing;
pub mod sim;
pub mod sleep;
pub mod staging;
pub mod status;
mod table;
mod thread_state;
pub mod torch;
