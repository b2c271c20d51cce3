//! An agent, its peers and its messages.
#![expect(unsafe_code, reason = "calls NIXL with values that it has made")]

use crate::{
    FixedMemory, Nixl, NixlError,
    library::{AgentConfig, Api, Handle, check},
    lists::{Owned, Unfinished, name, text},
};
use nix::libc::free;
use std::{
    ffi::CString,
    fmt,
    mem::ManuallyDrop,
    ptr::null_mut,
    slice,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// This process as NIXL knows it: its backends, registrations and peers. A clone is the same agent.
///
/// Several threads may use it: NIXL serialises them. A thread of NIXL's makes progress between
/// polls.
#[derive(Clone)]
pub struct NixlAgent(pub(crate) Arc<AgentInner>);

pub(crate) struct AgentInner {
    nixl: Nixl,
    pub(crate) handle: Handle,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The backends, as addresses.
    backends: Vec<Backend>,
    /// Transfers that were given up before their end.
    unfinished: Vec<Unfinished>,
    /// Memory whose registration NIXL did not end.
    kept: Vec<Arc<dyn FixedMemory>>,
}

/// A backend of an agent.
struct Backend(Handle);

// SAFETY: 1. NIXL's values are not bound to a thread, and the agent is created with NIXL's strict
// synchronisation.
unsafe impl Send for Backend {}
// SAFETY: 1. as above. The other fields are so by themselves.
unsafe impl Send for AgentInner {}
// SAFETY: 1. as above.
unsafe impl Sync for AgentInner {}

impl NixlAgent {
    /// Creates an agent without backends. Its name is the one that peers see, and must be another
    /// one for each.
    ///
    /// # Errors
    /// [`NixlError::BadName`]; [`NixlError::Call`].
    pub fn new(nixl: &Nixl, agent: &str) -> Result<Self, NixlError> {
        let agent = name(agent)?;
        let config = AgentConfig {
            progress_thread: true,
            listen_thread: false,
            listen_port: 0,
            thread_sync: 1,
            workers: 1,
            progress_delay_us: 0,
            listen_delay_us: 100_000,
            telemetry: false,
            reserved: [0; 8],
        };
        let mut handle = null_mut();
        // SAFETY: 1. the name ends with a zero, and name and settings are copied. 2. the place is
        // valid for the write.
        check("create_configured_agent", unsafe {
            (nixl.0.create_configured_agent)(agent.as_ptr(), &raw const config, &raw mut handle)
        })?;
        let state = Mutex::default();
        Ok(Self(Arc::new(AgentInner { nixl: nixl.clone(), handle, state })))
    }

    /// Adds a transport: `"UCX"`, or another plug-in of NIXL's, with its parameters. Blocks while
    /// the transport looks for its devices.
    ///
    /// # Errors
    /// [`NixlError::BadName`]; [`NixlError::Call`] if there is no such plug-in.
    pub fn add_backend(&self, plugin: &str, parameters: &[(&str, &str)]) -> Result<(), NixlError> {
        let (api, plugin) = (self.api(), name(plugin)?);
        let parameters = Owned::parameters(api, parameters)?;
        let create = |made| {
            // SAFETY: 1. agent and parameters are live. 2. the name ends with a zero. 3. the place
            // is valid for the write.
            unsafe { (api.create_backend)(self.0.handle, plugin.as_ptr(), parameters.handle, made) }
        };
        let backend = Owned::new(api, "create_backend", create, api.destroy_backend)?;
        self.0.state().backends.push(Backend(backend.into_handle()));
        Ok(())
    }

    /// Returns what peers need to reach the agent and its registrations, those made until now. Send
    /// it by a channel of your own.
    ///
    /// # Errors
    /// [`NixlError::Call`], also without a backend.
    pub fn metadata(&self) -> Result<Vec<u8>, NixlError> {
        let (mut data, mut bytes) = (null_mut(), 0);
        // SAFETY: 1. the agent is live. 2. both places are valid for the write.
        check("get_local_md", unsafe {
            (self.api().get_local_md)(self.0.handle, &raw mut data, &raw mut bytes)
        })?;
        if data.is_null() {
            return Ok(Vec::new());
        }
        // SAFETY: 1. NIXL has allocated this many bytes by malloc for the caller.
        let copy = unsafe { slice::from_raw_parts(data.cast_const().cast::<u8>(), bytes) }.to_vec();
        // SAFETY: 1. as above, and nothing refers to them any more.
        unsafe { free(data) };
        Ok(copy)
    }

    /// Loads the metadata of a peer, also anew after it has registered more.
    ///
    /// # Errors
    /// [`NixlError::Call`] for bytes that are no metadata, and where no backend is one of the
    /// peer's.
    pub fn add_peer(&self, metadata: &[u8]) -> Result<NixlPeer, NixlError> {
        let mut found = null_mut();
        // SAFETY: 1. the agent is live. 2. the bytes are copied. 3. the place is valid for the
        // write.
        check("load_remote_md", unsafe {
            (self.api().load_remote_md)(
                self.0.handle,
                metadata.as_ptr().cast(),
                metadata.len(),
                &raw mut found,
            )
        })?;
        // SAFETY: 1. NIXL has made a text for the caller by strdup.
        let peer = unsafe { text(found) };
        // SAFETY: 1. as above, and nothing refers to it any more.
        unsafe { free(found.cast()) };
        Ok(NixlPeer { name: name(&peer)?, agent: self.0.clone() })
    }

    /// Forgets a peer and closes the connection to it, as after its death. Its transfers fail.
    ///
    /// # Errors
    /// [`NixlError::OtherAgent`]; [`NixlError::Call`] if it is forgotten already.
    pub fn remove_peer(&self, peer: &NixlPeer) -> Result<(), NixlError> {
        if !peer.is_of(&self.0) {
            return Err(NixlError::OtherAgent);
        }
        // SAFETY: 1. the agent is live. 2. the name ends with a zero.
        check("invalidate_remote_md", unsafe {
            (self.api().invalidate_remote_md)(self.0.handle, peer.name.as_ptr())
        })
    }

    /// Returns the messages of transfers of peers that have ended since the last call. Frees the
    /// memory of transfers that were given up and are over.
    ///
    /// # Errors
    /// [`NixlError::Call`].
    pub fn messages(&self) -> Result<Vec<NixlMessage>, NixlError> {
        self.0.end_finished();
        let map = Owned::messages(self.api())?;
        // SAFETY: 1. agent and map are live.
        check("get_notifs", unsafe {
            (self.api().get_notifs)(self.0.handle, map.handle, null_mut())
        })?;
        messages_in(&map)
    }

    pub(crate) fn api(&self) -> &Api {
        self.0.api()
    }
}

/// Returns the messages of a map.
fn messages_in(map: &Owned<'_>) -> Result<Vec<NixlMessage>, NixlError> {
    let (api, mut peers, mut found) = (map.api(), 0, Vec::new());
    // SAFETY: 1. the map is live. 2. the place is valid for the write.
    check("notif_map_size", unsafe { (api.notif_map_size)(map.handle, &raw mut peers) })?;
    for at in 0..peers {
        let (mut peer, mut count) = (std::ptr::null(), 0);
        // SAFETY: 1. the map is live. 2. the place is valid for the write.
        check("notif_map_get_agent_at", unsafe {
            (api.notif_map_get_agent_at)(map.handle, at, &raw mut peer)
        })?;
        // SAFETY: 1. the map is live, and the name is in it. 2. the place is valid for the write.
        check("notif_map_get_notifs_size", unsafe {
            (api.notif_map_get_notifs_size)(map.handle, peer, &raw mut count)
        })?;
        for number in 0..count {
            let (mut data, mut bytes) = (std::ptr::null(), 0);
            // SAFETY: 1. as above, for both places.
            check("notif_map_get_notif", unsafe {
                (api.notif_map_get_notif)(map.handle, peer, number, &raw mut data, &raw mut bytes)
            })?;
            let message = if data.is_null() || bytes == 0 {
                Vec::new()
            } else {
                // SAFETY: 1. the bytes are in the map, which is live.
                unsafe { slice::from_raw_parts(data.cast::<u8>(), bytes) }.to_vec()
            };
            // SAFETY: 1. the name is in the map, and ends with a zero.
            found.push(NixlMessage { peer: unsafe { text(peer) }, message });
        }
    }
    Ok(found)
}

impl AgentInner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn api(&self) -> &Api {
        &self.nixl.0
    }

    /// Keeps memory whose registration has not ended, as long as the agent: a transport may still
    /// access it.
    pub(crate) fn keep_registered(&self, memory: Arc<dyn FixedMemory>) {
        self.state().kept.push(memory);
    }

    /// Ends a request, which aborts a transfer that is not over. If NIXL refuses, the agent keeps
    /// it with its memory.
    pub(crate) fn end(&self, transfer: Unfinished) {
        // SAFETY: 1. agent and request are live.
        let status = unsafe { (self.api().release_xfer_req)(self.handle, transfer.request) };
        if status != 0 {
            self.state().unfinished.push(transfer);
            return;
        }
        // SAFETY: 1. the request is released, and this is its only owner.
        let _ = unsafe { (self.api().destroy_xfer_req)(transfer.request) };
    }

    /// Ends the transfers that were given up and are over now.
    pub(crate) fn end_finished(&self) {
        if self.state().unfinished.is_empty() {
            return;
        }
        let all = std::mem::take(&mut self.state().unfinished);
        // Each that is not over returns to the list.
        all.into_iter().for_each(|transfer| self.end(transfer));
    }
}

impl Drop for NixlAgent {
    fn drop(&mut self) {
        // A transfer that was given up keeps the agent, so this may be the last call that ends it.
        self.0.end_finished();
    }
}

impl Drop for AgentInner {
    fn drop(&mut self) {
        let api = self.nixl.0.clone();
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: 1. all that the agent has made keeps it, so nothing of it is left but what
        // follows. A transfer that is not over keeps a part, and thereby the agent.
        let is_gone = unsafe { (api.destroy_agent)(self.handle) } == 0;
        for Backend(backend) in state.backends.drain(..) {
            // SAFETY: 1. the agent has made it, and this is its only owner.
            let _ = unsafe { (api.destroy_backend)(backend) };
        }
        // With the transports goes what accessed the memory. If they did not go, it stays.
        if !is_gone {
            let _kept = ManuallyDrop::new(std::mem::take(&mut state.kept));
        }
    }
}

/// Another agent, by its metadata. It keeps this process's agent.
#[derive(Clone)]
pub struct NixlPeer {
    name: CString,
    agent: Arc<AgentInner>,
}

impl NixlPeer {
    /// Returns its name.
    #[must_use]
    pub fn name(&self) -> String {
        self.name.to_string_lossy().into_owned()
    }

    pub(crate) fn c_name(&self) -> &CString {
        &self.name
    }

    pub(crate) fn is_of(&self, agent: &Arc<AgentInner>) -> bool {
        Arc::ptr_eq(&self.agent, agent)
    }
}

/// What a peer has sent with the end of a transfer.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct NixlMessage {
    /// The name of the peer.
    pub peer: String,
    /// The bytes.
    pub message: Vec<u8>,
}

impl fmt::Debug for NixlAgent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlAgent").finish_non_exhaustive()
    }
}

impl fmt::Debug for NixlPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlPeer").field("name", &self.name).finish_non_exhaustive()
    }
}
