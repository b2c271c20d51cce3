//! Transfers.
#![expect(unsafe_code, reason = "calls NIXL with values that it has made")]

use crate::{
    NixlAgent, NixlError, NixlPeer, RegisteredPart, RemoteRange,
    agent::AgentInner,
    library::{IN_PROGRESS, check},
    lists::{Owned, Unfinished},
};
use crossbeam_utils::Backoff;
use std::{
    ffi::c_int,
    fmt,
    ptr::null_mut,
    sync::Arc,
    time::{Duration, Instant},
};

/// Between two polls of a transfer that takes long.
const PAUSE: Duration = Duration::from_micros(20);

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From the peer to this process.
    Read,
    /// From this process to the peer.
    Write,
}

/// A transfer that has begun. It keeps its memory registered and in place.
///
/// Dropped before its end, it is aborted. Where NIXL cannot abort it, the agent keeps it and its
/// memory until it is over, and frees them with the next transfer, call of
/// [`messages`](NixlAgent::messages) or dropped [`NixlAgent`] after that. If there is none, they
/// stay until the process ends.
pub struct NixlTransfer {
    agent: Arc<AgentInner>,
    /// `None` once it is given up.
    unfinished: Option<Unfinished>,
}

impl NixlAgent {
    /// Begins to copy between parts of this process and ranges of a peer, the first with the first
    /// and so on. Does not wait for it. The peer gets `message` when all of it is there.
    ///
    /// The caller must order the transfer with kernels and copies that use the same memory: none of
    /// them may run before its end.
    ///
    /// # Errors
    /// [`NixlError::Unpaired`]; [`NixlError::OtherAgent`]; [`NixlError::Call`] where a range is not
    /// registered, and where the peer is gone.
    pub fn transfer(
        &self,
        direction: Direction,
        peer: &NixlPeer,
        local: &[RegisteredPart],
        remote: &[RemoteRange],
        message: Option<&[u8]>,
    ) -> Result<NixlTransfer, NixlError> {
        self.0.end_finished();
        if !peer.is_of(&self.0) || local.iter().any(|part| !part.is_of(&self.0)) {
            return Err(NixlError::OtherAgent);
        }
        let unpaired = NixlError::Unpaired { local: local.len(), remote: remote.len() };
        let (Some(first), Some(there)) = (local.first(), remote.first()) else {
            return Err(unpaired);
        };
        let (here, there) = (first.range().place.kind(), there.0.place.kind());
        let pairs = || local.iter().zip(remote);
        let is_paired = local.len() == remote.len()
            && pairs().all(|(part, range)| {
                part.range().bytes == range.0.bytes
                    && part.range().place.kind() == here
                    && range.0.place.kind() == there
            });
        if !is_paired {
            return Err(unpaired);
        }
        let api = self.api();
        let ours = Owned::side(api, here, local.iter().map(RegisteredPart::range))?;
        let theirs = Owned::side(api, there, remote.iter().map(RemoteRange::range))?;
        let options = message.map(|message| Owned::message(api, message)).transpose()?;
        let options = options.as_ref().map_or(null_mut(), |options| options.handle);
        let way: c_int = match direction {
            Direction::Read => 0,
            Direction::Write => 1,
        };
        let mut request = null_mut();
        // SAFETY: 1. the agent, both lists and the options are live, and are copied. 2. the name
        // ends with a zero. 3. the place is valid for the write. 4. the parts keep the memory of
        // this side registered.
        check("create_xfer_req", unsafe {
            (api.create_xfer_req)(
                self.0.handle,
                way,
                ours.handle,
                theirs.handle,
                peer.c_name().as_ptr(),
                &raw mut request,
                options,
            )
        })?;
        let unfinished =
            Some(Unfinished { request, _kept: local.iter().map(RegisteredPart::keep).collect() });
        let transfer = NixlTransfer { agent: self.0.clone(), unfinished };
        // SAFETY: 1. agent, request and options are live.
        let status = unsafe { (api.post_xfer_req)(self.0.handle, request, options) };
        if status == IN_PROGRESS {
            return Ok(transfer);
        }
        check("post_xfer_req", status).map(|()| transfer)
    }
}

impl NixlTransfer {
    /// Returns whether all bytes have arrived. Does not block.
    ///
    /// # Errors
    /// [`NixlError::Call`] if the transfer has failed, as when the peer has died. Some bytes may
    /// have arrived.
    pub fn is_done(&self) -> Result<bool, NixlError> {
        let Some(Unfinished { request, .. }) = &self.unfinished else { return Ok(true) };
        // SAFETY: 1. agent and request are live.
        let status = unsafe { (self.agent.api().get_xfer_status)(self.agent.handle, *request) };
        if status == IN_PROGRESS {
            Ok(false)
        } else {
            check("get_xfer_status", status).map(|()| true)
        }
    }

    /// Waits until all bytes have arrived, for at most `patience`. Polls, with pauses of at most 20
    /// µs once it takes long.
    ///
    /// # Errors
    /// As [`NixlTransfer::is_done`]; [`NixlError::Late`].
    pub fn wait(self, patience: Duration) -> Result<(), NixlError> {
        let (begun, backoff) = (Instant::now(), Backoff::new());
        while !self.is_done()? {
            if begun.elapsed() >= patience {
                return Err(NixlError::Late { waited: patience });
            }
            if backoff.is_completed() { std::thread::sleep(PAUSE) } else { backoff.snooze() }
        }
        Ok(())
    }
}

impl Drop for NixlTransfer {
    fn drop(&mut self) {
        if let Some(unfinished) = self.unfinished.take() {
            self.agent.end(unfinished);
        }
    }
}

impl fmt::Debug for NixlTransfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlTransfer").finish_non_exhaustive()
    }
}
