//! One opener of a server, within bounds of time and without a wait.
//!
//! ```text
//!   Request ──▶ Send the answer ──▶ Send the header ──▶ Send a batch ──▶ Acknowledge ─┐
//!      │                                                     ▲ │ the last one         │
//!      │                                                     └─┼──────────────────────┘
//!      └─── any error, or the step's deadline ──▶ over ◀───────┘
//! ```

use super::{
    SharedBlock,
    error::ShareError,
    forks::Unforked,
    wire::{Answer, OpenRequest, receive_part, send_part},
};
use std::{
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
    time::{Duration, Instant},
};

/// How long an opener may take for each step.
const STEP: Duration = Duration::from_secs(2);

/// A connection to an opener, which the server continues whenever its socket is ready.
pub(super) struct Conversation {
    socket: Unforked<UnixStream>,
    step: OpenerStep,
    /// The end of the step. Nothing prolongs it but the end of the step itself.
    pub(super) deadline: Instant,
}

/// What happens next on a connection.
enum OpenerStep {
    /// Receives the request.
    Request { message: [u8; OpenRequest::BYTES], received: usize },
    /// Sends bytes, the first of them with the descriptors, and then the rest of the block.
    Send { bytes: Vec<u8>, sent: usize, files: Vec<OwnedFd>, then: Option<Rest> },
    /// Receives a byte before the rest of the block follows.
    Acknowledge(Rest),
}

/// The messages of a block from this one on.
struct Rest {
    block: Arc<SharedBlock>,
    message: usize,
}

impl Rest {
    fn send(self) -> Result<OpenerStep, ShareError> {
        let (bytes, files) = self.block.message(self.message)?;
        let next = Self { message: self.message + 1, ..self };
        let then = (next.message < next.block.messages()).then_some(next);
        Ok(OpenerStep::Send { bytes, sent: 0, files, then })
    }
}

impl Conversation {
    /// The socket must not block.
    pub(super) fn new(socket: Unforked<UnixStream>) -> Self {
        let step = OpenerStep::Request { message: [0; OpenRequest::BYTES], received: 0 };
        Self { socket, step, deadline: Instant::now() + STEP }
    }

    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.get().map(AsFd::as_fd)
    }

    /// Returns whether it waits until it can write. Otherwise it waits to read.
    pub(super) fn is_sending(&self) -> bool {
        matches!(self.step, OpenerStep::Send { .. })
    }

    /// Returns whether nothing was asked yet.
    pub(super) fn is_idle(&self) -> bool {
        matches!(self.step, OpenerStep::Request { .. })
    }

    /// Does what is possible without waiting. `find` returns the answer to a request, and the block
    /// that follows it.
    ///
    /// # Errors
    /// [`ShareError::TimedOut`] if the socket has to become ready first. Any other error, and no
    /// error, is the end.
    pub(super) fn advance(
        &mut self,
        find: impl Fn(&OpenRequest) -> (Answer, Option<Arc<SharedBlock>>),
    ) -> Result<(), ShareError> {
        let Some(socket) = self.socket.get() else { return Ok(()) };
        loop {
            let next = match &mut self.step {
                OpenerStep::Request { message, received } => {
                    *received += receive_plain(socket, &mut message[*received..])?;
                    if *received < message.len() {
                        continue;
                    }
                    let (answer, block) = find(&OpenRequest::decode(message)?);
                    let then = block.map(|block| Rest { block, message: 0 });
                    let bytes = answer.encode().to_vec();
                    OpenerStep::Send { bytes, sent: 0, files: Vec::new(), then }
                }
                OpenerStep::Send { bytes, sent, files, then } => {
                    while *sent < bytes.len() {
                        let with: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                        *sent += send_part(socket, &bytes[*sent..], &with)?;
                        // The kernel has copies of those that are on their way.
                        files.clear();
                    }
                    match then.take() {
                        None => return Ok(()),
                        Some(rest) if SharedBlock::follows_acknowledgement(rest.message) => {
                            OpenerStep::Acknowledge(rest)
                        }
                        Some(rest) => rest.send()?,
                    }
                }
                OpenerStep::Acknowledge(rest) => {
                    receive_plain(socket, &mut [0])?;
                    Rest { block: rest.block.clone(), ..*rest }.send()?
                }
            };
            (self.step, self.deadline) = (next, Instant::now() + STEP);
        }
    }
}

/// Receives bytes without descriptors. Returns how many, at least one.
fn receive_plain(socket: &UnixStream, bytes: &mut [u8]) -> Result<usize, ShareError> {
    let mut files = Vec::new();
    match (receive_part(socket, bytes, &mut files)?, files.len()) {
        (0, _) => Err(ShareError::Truncated { expected: bytes.len(), received: 0 }),
        (received, 0) => Ok(received),
        (_, actual) => Err(ShareError::Descriptors { expected: 0, actual }),
    }
}
