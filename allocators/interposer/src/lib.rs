//! The library by which `aquifer run` observes and limits the CUDA calls of any program.
//!
//! It is preloaded, and its name for the dynamic linker is `libcuda.so.1`. So it *is* the driver
//! for a program that is linked to it or opens it by `dlopen`. It has the functions by which memory
//! is taken and given back. Every other symbol is the driver's own: this library needs the driver
//! under another name, and the linker looks there next. See `build.rs`.
//!
//! ```text
//!   program ── cuMemAlloc_v2 ──▶ hooks ──▶ session: charge ─▶ driver ─▶ record
//!           ── cuLaunchKernel ─────────────────────────────▶ driver
//!           ── cuGetProcAddress ─▶ hooks ──▶ driver, whose answer is replaced if it is hooked
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `hooks` | the functions in place of the driver's |
//! | `session` | what the process has; the steps before and after a call |
//! | `blocks`, `virtual_memory` | live blocks; physical handles and their mappings |
//! | `pools` | the driver's pools |
//! | `holder` | what is held of one memory, its budget and its figures |
//! | `nvml` | the driver's own memory |
//! | `log` | the trace |
//! | `callers` | who asked for memory |
//! | `serve` | stream-ordered blocks from a pool of this library |
//! | `settings` | what `aquifer run` has asked for |
//! | `guest` | what a guest in another program needs: messages, locks, signals |
//! | `real` | the driver's functions |
//!
//! What a step of this library cannot do leaves the call to the driver. A panic is contained, and
//! the process goes on without it. A forked child passes every call on, as CUDA does not survive a
//! fork; a program that it executes begins anew.
#![expect(unsafe_code, reason = "runs at the end of the process")]

mod blocks;
mod callers;
mod guest;
mod holder;
mod hooks;
mod log;
mod nvml;
mod pools;
mod real;
mod serve;
mod session;
mod settings;
mod virtual_memory;

/// Runs when the process ends, or when this library is unloaded.
// SAFETY: 1. The section holds pointers to functions without arguments.
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = session::end;
