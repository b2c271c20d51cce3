//! Pinned and device memory in registrations of NIXL, NVIDIA's transfer library for inference.
//!
//! A transport such as UCX knows memory by its registration. Memory that moves or is freed while it
//! is registered is silently read and written as other memory. Here a registration keeps its memory
//! in place until it has ended, and a transfer keeps both. Memory that can move has no
//! [`FixedMemory`], so it cannot be registered.
//!
//! `libnixl_capi.so`, NIXL's interface for C, is opened at run time. NIXL's wheel has it: `pip
//! install nixl-cu13`. Nothing of NIXL is needed to build.
//!
//! ```no_run
//! use aquifer::Runtime;
//! use aquifer_nixl::{
//!     Direction, Nixl, NixlAgent, NixlMessage, NixlPeer, NixlTransfer, RegisteredPool,
//!     RemoteRange,
//! };
//! use std::time::Duration;
//! # fn exchange(_: &[u8], _: [u8; 24]) -> (Vec<u8>, [u8; 24]) { (Vec::new(), [0; 24]) }
//! let nixl = Nixl::open()?;
//! let agent = NixlAgent::new(&nixl, "client")?;
//! agent.add_backend("UCX", &[])?;
//! let runtime = Runtime::builder().build()?;
//! let pool = RegisteredPool::new(&agent, runtime.pinned_near(0), 1 << 30)?; // one registration
//! let cache = pool.allocate(64 << 20)?;
//! // Both sides exchange these over a channel of their own.
//! let (metadata, location) = exchange(&agent.metadata()?, cache.part().location().to_bytes());
//! let peer: NixlPeer = agent.add_peer(&metadata)?;
//! let source = RemoteRange::from_bytes(location)?;
//! let parts = [cache.part().clone()];
//! let read: NixlTransfer = agent.transfer(Direction::Read, &peer, &parts, &[source], None)?;
//! read.wait(Duration::from_secs(10))?;
//! for NixlMessage { peer, message, .. } in agent.messages()? {
//!     println!("{peer} has written: {message:?}");
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `library` | the functions of NIXL that are used, and how they are found |
//! | `lists` | values that NIXL makes, each freed with its owner |
//! | `agent` | an agent, its peers and messages, and what it keeps |
//! | `memory` | which memory can be registered, and names of ranges |
//! | `pinned` | pinned memory that can be registered |
//! | `registration` | a registration, and its parts |
//! | `pool` | pinned memory under one registration, divided into blocks |
//! | `transfer` | transfers |
//! | `error` | what is refused |
//! | `simulated` | a NIXL within one thread, for tests and fuzz programs |
//!
//! # Invariants
//! - **Memory is registered for a part of its life.** A registration ends before it lets go of its
//!   memory. If NIXL refuses to end it, the agent keeps the memory.
//! - **A transfer keeps its memory.** Where it is dropped before its end and NIXL cannot abort it,
//!   the agent keeps it until it is over, and ends it in its next call.
//! - **An agent outlives all that it has made.**
//! - **Registered bytes are no Rust references.** A peer may write to them at any time, so they are
//!   reached through raw pointers and copies.
//!
//! Part of aquifer; promises no stability beyond what aquifer re-exports.

mod agent;
mod error;
mod library;
mod lists;
mod memory;
mod pinned;
mod pool;
mod registration;
#[cfg(any(test, feature = "simulated"))]
#[doc(hidden)]
pub mod simulated;
#[cfg(test)]
mod tests;
mod transfer;

pub use agent::{NixlAgent, NixlMessage, NixlPeer};
pub use error::NixlError;
pub use library::Nixl;
pub use memory::{FixedMemory, FixedRange, MemoryPlace, RemoteRange};
pub use pinned::PinnedRange;
pub use pool::{RegisteredBlock, RegisteredPool};
pub use registration::{NixlRegistration, RegisteredPart};
pub use transfer::{Direction, NixlTransfer};
