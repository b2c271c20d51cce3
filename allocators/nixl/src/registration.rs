//! A registration, and its parts.
#![expect(unsafe_code, reason = "calls NIXL with memory that it keeps")]

use crate::{
    FixedMemory, FixedRange, NixlAgent, NixlError, RemoteRange, agent::AgentInner, library::check,
    lists::Owned,
};
use std::{any::Any, fmt, ptr::null_mut, sync::Arc};

/// Memory that an agent has registered: a stable block, as here, or a
/// [pool](crate::RegisteredPool). It stays registered and in place while this value, a clone of it,
/// one of its parts or a transfer of them lives.
///
/// ```no_run
/// use aquifer::{Request, Runtime};
/// use aquifer_nixl::{FixedMemory, Nixl, NixlAgent, NixlRegistration, RegisteredPart};
/// use std::sync::Arc;
/// let runtime = Runtime::builder().build()?;
/// let (pool, stream) = (runtime.device(0)?, runtime.device(0)?.stream()?);
/// let weights = pool.alloc_stable_legacy(&stream, Request::bytes(1 << 30))?;
/// let agent = NixlAgent::new(&Nixl::open()?, "server")?;
/// agent.add_backend("UCX", &[])?;
/// let memory: Arc<dyn FixedMemory> = Arc::new(weights.register());
/// let registration: NixlRegistration = agent.register(memory)?;
/// let layer: RegisteredPart = registration.part(64 << 20, 32 << 20)?; // one range of a transfer
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The end calls NIXL (`deregisterMem`), which may block while a transport unpins the memory.
#[derive(Clone)]
pub struct NixlRegistration(Arc<Registered>);

struct Registered {
    agent: Arc<AgentInner>,
    memory: Arc<dyn FixedMemory>,
    range: FixedRange,
}

impl NixlAgent {
    /// Registers memory with all backends of the agent that take its kind (`registerMem`). Peers
    /// that get the agent's metadata after that can read and write it. Blocks while a transport
    /// pins the memory.
    ///
    /// # Errors
    /// [`NixlError::OutOfBounds`] for an empty range; [`NixlError::Call`], also if no backend takes
    /// such memory.
    pub fn register(&self, memory: Arc<dyn FixedMemory>) -> Result<NixlRegistration, NixlError> {
        let range = memory.fixed_range();
        if range.bytes == 0 {
            return Err(NixlError::OutOfBounds { offset: 0, bytes: 0, within: 0 });
        }
        let api = self.api();
        let list = Owned::registration(api, range)?;
        // SAFETY: 1. the agent and the list are live. 2. the memory stays valid and in place until
        // `Registered` has ended the registration.
        check("register_mem", unsafe {
            (api.register_mem)(self.0.handle, list.handle, null_mut())
        })?;
        let agent = self.0.clone();
        Ok(NixlRegistration(Arc::new(Registered { agent, memory, range })))
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let api = self.agent.api();
        let ended = Owned::registration(api, self.range).and_then(|list| {
            // SAFETY: 1. the agent and the list are live. 2. no transfer uses the memory: it would
            // keep this value.
            let status =
                unsafe { (api.deregister_mem)(self.agent.handle, list.handle, null_mut()) };
            check("deregister_mem", status)
        });
        if ended.is_err() {
            self.agent.keep_registered(self.memory.clone());
        }
    }
}

impl NixlRegistration {
    /// Returns what is registered.
    #[must_use]
    pub fn range(&self) -> FixedRange {
        self.0.range
    }

    /// Returns a part, by its offset and length in bytes.
    ///
    /// # Errors
    /// [`NixlError::OutOfBounds`] for an empty part, and for one that is not within the memory.
    pub fn part(&self, offset: u64, bytes: u64) -> Result<RegisteredPart, NixlError> {
        let range = self.0.range.part(offset, bytes)?;
        if bytes == 0 {
            return Err(NixlError::OutOfBounds { offset, bytes, within: self.0.range.bytes });
        }
        Ok(self.part_kept_by(range, self.0.clone()))
    }

    /// Returns a part that `keep` keeps, and the registration with it.
    pub(crate) fn part_kept_by(
        &self,
        range: FixedRange,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> RegisteredPart {
        RegisteredPart { agent: self.0.agent.clone(), range, keep }
    }
}

/// A part of registered memory: one range of a transfer. It keeps the registration.
#[derive(Clone)]
pub struct RegisteredPart {
    agent: Arc<AgentInner>,
    range: FixedRange,
    /// What must live as long as the range is used.
    keep: Arc<dyn Any + Send + Sync>,
}

impl RegisteredPart {
    /// Returns where it lies.
    #[must_use]
    pub fn range(&self) -> FixedRange {
        self.range
    }

    /// Returns the name of the part for peers.
    #[must_use]
    pub fn location(&self) -> RemoteRange {
        RemoteRange(self.range)
    }

    /// Returns what keeps the memory.
    pub(crate) fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        self.keep.clone()
    }

    /// Returns whether it is registered with this agent.
    pub(crate) fn is_of(&self, agent: &Arc<AgentInner>) -> bool {
        Arc::ptr_eq(&self.agent, agent)
    }
}

impl fmt::Debug for NixlRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlRegistration").field("range", &self.0.range).finish_non_exhaustive()
    }
}

impl fmt::Debug for RegisteredPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisteredPart").field("range", &self.range).finish_non_exhaustive()
    }
}
