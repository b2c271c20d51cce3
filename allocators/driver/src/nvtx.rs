//! NVTX: announces the memory of pools to a tool that checks accesses, such as compute-sanitizer.
//!
//! To a memory checker a pool is a few large allocations, in which every byte is valid. NVTX's
//! memory extension lets a pool announce what is in use. The tool then finds an access beyond a
//! block or after its end although the memory around it is mapped.
//!
//! | file | holds |
//! |---|---|
//! | `abi` | the types of NVTX's C interface |
//! | `core_table` | what a tool attaches its functions to, for domains |
//! | `tool` | the search for a tool, its start, and calls of its functions |
//! | `announcer` | which heaps and regions are announced, from the events of the pools |
//!
//! # What is announced
//! - Each allocation of the driver is a *heap* for suballocation. Nothing in it may be accessed
//!   until a region is registered there.
//! - Each block is a *region* of the requested bytes, from its allocation until its last use is
//!   over. It is named after its tag.
//! - Announcements come in the order in which things happen, and before the pool's call returns:
//!   see [`announcement`](aquifer_core::event::announcement).
//!
//! - Launches of a graph access blocks that were freed during its capture. So what a block of a
//!   graph has occupied stays a region until its memory returns to the driver.
//!
//! compute-sanitizer 2025.3 accepts a heap only if it is a whole allocation of `cuMemAlloc`. It
//! refuses mappings (`cuMemMap`), memory of the driver's own pools, and parts of allocations, and
//! counts each refusal as an error. So pools take whole allocations while they are announced.
//! Parkable and reserved memory is mapped, and is not announced: it stays valid as a whole. So does
//! pinned memory. Driver allocations that are one block each are seen by the tool itself.
//!
//! # How a tool is found
//! As by NVIDIA's headers, version 3 of the load sequence. The file and line numbers are those of
//! the package nvidia-nvtx 13.5.25, folder `nvtx3`:
//!
//! 1. The library that `NVTX_INJECTION64_PATH` names, which tools set. The value `./.` ends the
//!    search (`nvtxDetail/nvtxExtInit.h`, lines 161–280; `nvtxDetail/nvtxInit.h`, lines 400–540).
//! 2. `cuNvtxGetInjectionInitializer` of the CUDA driver, if a tool has created `nvtx-cuda.yaml`
//!    (`nvtxInit.h`, `nvtxShouldUseCudaDriverInjection`).
//!
//! Its function `InitializeInjectionNvtx2` is called first, then `InitializeInjectionNvtxExtension`
//! with the slots of the memory extension (`nvtxExtInit.h`, `nvtxExtInitOnce`; the slots are in
//! `nvtxDetail/nvtxExtImplMem_v1.h`). A failure of the first does not prevent the second. A library
//! linked into the program is not looked for: that needs a weak symbol, which only C has.
//!
//! Tools require an initialised CUDA, so a device pool attaches the tool when it is opened.

mod abi;
mod announcer;
mod core_table;
mod tool;

use announcer::PoolAnnouncer;
use aquifer_core::{
    Recorder,
    event::{NullSink, announcement::set_announcer},
};
use std::sync::{Arc, OnceLock};
use tool::MemoryTool;

/// Whether a tool is attached, or the recorder for pools without one of their own.
static ATTACHED: OnceLock<Option<Arc<Recorder>>> = OnceLock::new();

/// Returns the recorder of a pool whose memory is to be announced. Finds and starts a tool at the
/// first call. Without a tool this returns `own`, and reports the reason once to `tracing`.
#[must_use]
pub fn announced(own: Option<Arc<Recorder>>) -> Option<Arc<Recorder>> {
    let attached = ATTACHED.get_or_init(|| match MemoryTool::start() {
        Ok(tool) => {
            let _first = set_announcer(Box::new(PoolAnnouncer::new(tool)));
            Some(Arc::new(Recorder::new(Arc::new(NullSink))))
        }
        Err(reason) => {
            tracing::warn!(target: "aquifer", "no memory is announced by NVTX: {reason}");
            None
        }
    });
    own.or_else(|| attached.clone())
}
