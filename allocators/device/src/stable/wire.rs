//! Messages with descriptors over a Unix socket, and what they say.
#![expect(unsafe_code, reason = "receives descriptors")]

use super::error::ShareError;
use aquifer_driver::Access;
use nix::{
    libc,
    sys::socket::{ControlMessage, MsgFlags, sendmsg},
};
use std::{
    io::{self, IoSlice},
    mem,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    ptr,
    time::{Duration, Instant},
};

/// The number of descriptors that Linux passes with one message (`SCM_MAX_FD`).
const MOST_DESCRIPTORS: usize = 253;

/// Bytes of a [`ShareHeader`] in a message.
pub(super) const HEADER: usize = 152;
/// The first bytes of each message. The last one is the version of the format.
const MAGIC: [u8; 8] = *b"aqshare\x01";
/// The maximum length of a name in bytes.
pub(super) const NAME: usize = 64;
/// The driver's numbers of the access.
const READ: u32 = 1;
const READ_WRITE: u32 = 3;
/// The first bytes of a request. The last one is the version of the format.
const REQUEST: [u8; 8] = *b"aqask\0\0\x02";

/// What is said of a block before its memory follows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ShareHeader {
    /// Number of handles.
    pub(super) handles: u32,
    /// Size and alignment of the handles, in bytes.
    pub(super) granularity: u64,
    /// The first byte of the block, counted from the start of the first handle.
    pub(super) offset: u64,
    /// Bytes of the block.
    pub(super) bytes: u64,
    /// What the receiver may do: read, or also write.
    pub(super) access: Access,
    /// The address of the device on its bus, or nothing.
    pub(super) device: String,
    pub(super) name: String,
}

impl ShareHeader {
    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut message = Vec::with_capacity(HEADER);
        message.extend(MAGIC);
        message.extend(self.handles.to_le_bytes());
        let access = if self.access.writes() { READ_WRITE } else { READ };
        message.extend(access.to_le_bytes());
        for number in [self.granularity, self.offset, self.bytes] {
            message.extend(number.to_le_bytes());
        }
        let mut encoded = [0; HEADER];
        encoded[..message.len()].copy_from_slice(&message);
        put(&mut encoded[40..80], &self.device);
        put(&mut encoded[80..], &self.name);
        encoded
    }

    pub(super) fn decode(message: &[u8; HEADER]) -> Result<Self, ShareError> {
        if message[..8] != MAGIC {
            return Err(ShareError::NotAShare);
        }
        let number = |at: usize| number(&message[at..at + 8]);
        let (handles, access) = (number(8) as u32, (number(8) >> 32) as u32);
        let access = match access {
            READ => Access::Read,
            READ_WRITE => Access::ReadWrite,
            _ => return Err(ShareError::BadField { field: "access", value: access.into() }),
        };
        Ok(Self {
            handles,
            granularity: number(16),
            offset: number(24),
            bytes: number(32),
            access,
            device: get(&message[40..80], "the device")?,
            name: get(&message[80..], "the name")?,
        })
    }
}

/// Returns the number in these bytes, the lowest of which comes first.
pub(super) fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// Writes a text and its length. A text that is too long is not written.
fn put(to: &mut [u8], text: &str) {
    let (length, rest) = to.split_at_mut(8);
    if let Some(place) = rest.get_mut(..text.len()) {
        place.copy_from_slice(text.as_bytes());
        length.copy_from_slice(&(text.len() as u64).to_le_bytes());
    }
}

fn get(from: &[u8], field: &'static str) -> Result<String, ShareError> {
    let (length, rest) = from.split_at(8);
    let value = number(length);
    let text = usize::try_from(value).ok().and_then(|length| rest.get(..length));
    let text = text.and_then(|text| str::from_utf8(text).ok());
    text.map(str::to_owned).ok_or(ShareError::BadField { field, value })
}

/// What an opener asks a server for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct OpenRequest {
    pub(super) name: String,
    /// The generation that the opener has already, or 0.
    pub(super) known: u64,
}

impl OpenRequest {
    pub(super) const BYTES: usize = 24 + NAME;

    pub(super) fn new(name: &str, known: u64) -> Result<Self, ShareError> {
        check_name(name)?;
        Ok(Self { name: name.to_owned(), known })
    }

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut encoded = [0; Self::BYTES];
        encoded[..8].copy_from_slice(&REQUEST);
        encoded[8..16].copy_from_slice(&self.known.to_le_bytes());
        put(&mut encoded[16..], &self.name);
        encoded
    }

    pub(super) fn decode(message: &[u8; Self::BYTES]) -> Result<Self, ShareError> {
        if message[..8] != REQUEST {
            return Err(ShareError::NotAShare);
        }
        Ok(Self { name: get(&message[16..], "the name")?, known: number(&message[8..16]) })
    }
}

/// Refuses a name that no message has room for.
pub(super) fn check_name(name: &str) -> Result<(), ShareError> {
    match name.len() {
        0..=NAME => Ok(()),
        length => {
            Err(ShareError::BadField { field: "the length of the name", value: length as u64 })
        }
    }
}

/// What a server says of a block. The numbers are generations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    NotServed,
    /// The block follows.
    Follows(u64),
    /// The block is the one that the opener knows, and does not follow.
    Unchanged(u64),
}

impl Answer {
    pub(super) const BYTES: usize = 16;

    pub(super) fn encode(self) -> [u8; Self::BYTES] {
        let (code, generation) = match self {
            Self::NotServed => (0_u64, 0),
            Self::Follows(generation) => (1, generation),
            Self::Unchanged(generation) => (2, generation),
        };
        let mut encoded = [0; Self::BYTES];
        encoded[..8].copy_from_slice(&code.to_le_bytes());
        encoded[8..].copy_from_slice(&generation.to_le_bytes());
        encoded
    }

    pub(super) fn decode(message: &[u8; Self::BYTES]) -> Result<Self, ShareError> {
        let (code, generation) = message.split_at(8);
        match (number(code), number(generation)) {
            (0, _) => Ok(Self::NotServed),
            (1, generation) => Ok(Self::Follows(generation)),
            (2, generation) => Ok(Self::Unchanged(generation)),
            (value, _) => Err(ShareError::BadField { field: "the answer", value }),
        }
    }
}

/// How long a call may block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Patience {
    /// As the socket's own timeouts say.
    OfSocket,
    /// All messages until then.
    Until(Instant),
    /// Each message for so long.
    Each(Duration),
}

/// A connected socket.
#[derive(Debug)]
pub(super) struct Connection<'a> {
    socket: &'a UnixStream,
    patience: Patience,
}

impl<'a> Connection<'a> {
    pub(super) fn new(socket: &'a UnixStream, patience: Patience) -> Self {
        Self { socket, patience }
    }

    /// Sends all of `bytes`, and the descriptors with the first of them.
    pub(super) fn send(
        &self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), ShareError> {
        let (mut sent, deadline) = (0, self.deadline());
        while sent < bytes.len() {
            if let Some(left) = time_left(deadline)? {
                self.socket.set_write_timeout(Some(left))?;
            }
            let descriptors = if sent == 0 { descriptors } else { &[] };
            sent += send_part(self.socket, &bytes[sent..], descriptors)?;
        }
        Ok(())
    }

    /// Receives exactly as many bytes as there is room for, with exactly `expected` descriptors.
    /// All descriptors are closed on failure.
    pub(super) fn receive(
        &self,
        bytes: &mut [u8],
        expected: usize,
    ) -> Result<Vec<OwnedFd>, ShareError> {
        let (mut received, mut descriptors) = (0, Vec::new());
        let deadline = self.deadline();
        while received < bytes.len() {
            if let Some(left) = time_left(deadline)? {
                self.socket.set_read_timeout(Some(left))?;
            }
            let count = receive_part(self.socket, &mut bytes[received..], &mut descriptors)?;
            if count == 0 {
                return Err(ShareError::Truncated { expected: bytes.len(), received });
            }
            received += count;
            if descriptors.len() > expected {
                break;
            }
        }
        match descriptors.len() {
            actual if actual == expected => Ok(descriptors),
            actual => Err(ShareError::Descriptors { expected, actual }),
        }
    }

    fn deadline(&self) -> Option<Instant> {
        match self.patience {
            Patience::OfSocket => None,
            Patience::Until(deadline) => Some(deadline),
            Patience::Each(time) => Some(Instant::now() + time),
        }
    }
}

fn time_left(deadline: Option<Instant>) -> Result<Option<Duration>, ShareError> {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    if left.is_some_and(|left| left.is_zero()) { Err(ShareError::TimedOut) } else { Ok(left) }
}

/// Sends once, and returns the number of bytes that were sent.
fn send_part(
    socket: &UnixStream,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<usize, ShareError> {
    let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &[] } else { &rights[..] };
    let (part, flags) = ([IoSlice::new(bytes)], MsgFlags::MSG_NOSIGNAL);
    loop {
        match sendmsg::<()>(socket.as_raw_fd(), &part, control, flags, None) {
            Err(nix::Error::EINTR) => {}
            sent => return Ok(sent.map_err(io::Error::from)?),
        }
    }
}

/// Memory for the descriptors of one message, aligned as their header is.
type ControlBuffer = [u64; 136];
const _: () = {
    let room = (MOST_DESCRIPTORS * size_of::<RawFd>()) as libc::c_uint;
    // SAFETY: 1. It only computes a length.
    assert!(unsafe { libc::CMSG_SPACE(room) } as usize <= size_of::<ControlBuffer>());
};

/// Receives once. The descriptors are closed on `exec`. (nix's `recvmsg` loses the descriptors of a
/// message that had more than could be opened.)
fn receive_part(
    socket: &UnixStream,
    bytes: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> Result<usize, ShareError> {
    let mut control: ControlBuffer = [0; 136];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: 1. All bytes zero is a message header without anything.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = (&raw mut control).cast();
    header.msg_controllen = size_of::<ControlBuffer>() as _;
    let count = loop {
        // SAFETY: 1. The header names one part and one control buffer, which are locals that may be
        // written, with their lengths.
        let count =
            unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) };
        match usize::try_from(count) {
            Ok(count) => break count,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error.into());
                }
            }
        }
    };
    // SAFETY: 1. The kernel has filled in the header, and the control buffer up to its new length.
    let mut message = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    // SAFETY: 1. It is null, or points to a header within the control buffer, which is aligned.
    while let Some(found) = unsafe { message.as_ref() } {
        if (found.cmsg_level, found.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: 1. It points to a header within the control buffer.
            let data: *const RawFd = unsafe { libc::CMSG_DATA(message) }.cast();
            // SAFETY: 1. It only computes a length.
            let head = unsafe { libc::CMSG_LEN(0) } as usize;
            let length = found.cmsg_len.saturating_sub(head) / size_of::<RawFd>();
            for at in 0..length {
                // SAFETY: 1. The message has `length` descriptors. 2. The kernel has opened each
                // for this call, and no other value owns it.
                let descriptor = unsafe { OwnedFd::from_raw_fd(ptr::read_unaligned(data.add(at))) };
                descriptors.push(descriptor);
            }
        }
        // SAFETY: 1. Both point to the header and the message that the kernel has filled in.
        message = unsafe { libc::CMSG_NXTHDR(&raw const header, message) };
    }
    if header.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(ShareError::DescriptorLimit);
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> ShareHeader {
        ShareHeader {
            handles: 3,
            granularity: 2 << 20,
            offset: 512,
            bytes: 5 << 20,
            access: Access::ReadWrite,
            device: "0000:1b:00.0".into(),
            name: "weights".into(),
        }
    }

    #[test]
    fn headers_round_trip() {
        for access in [Access::Read, Access::ReadWrite] {
            let header = ShareHeader { access, ..header() };
            assert_eq!(ShareHeader::decode(&header.encode()).ok(), Some(header));
        }
    }

    #[test]
    fn damaged_headers_are_refused_by_field() {
        let refused = |at: usize, byte: u8| {
            let mut message = header().encode();
            message[at] = byte;
            ShareHeader::decode(&message).map_err(|error| error.to_string()).err()
        };
        let of = |text: Option<String>, word: &str| text.is_some_and(|text| text.contains(word));
        assert!(of(refused(0, 0), "no shared block"));
        assert!(of(refused(7, 2), "no shared block"), "another version");
        assert!(of(refused(12, 2), "access"));
        assert!(of(refused(40, 200), "device"), "a length beyond its place");
        assert!(of(refused(87, 1), "name"), "a length of 2^56");
        assert!(of(refused(88, 0xff), "name"), "no text");
    }

    #[test]
    fn requests_and_answers_round_trip_and_others_are_refused() {
        let request = OpenRequest::new("weights", 7).ok();
        let encoded = request.as_ref().map(OpenRequest::encode);
        let decoded = |message| OpenRequest::decode(&message).ok();
        assert_eq!(encoded.and_then(decoded), request);
        for (at, byte) in [(0, 0), (7, 1), (16, 65), (23, 1), (24, 0xff)] {
            let changed = encoded.map(|mut message| {
                message[at] = byte;
                message
            });
            assert_eq!(changed.and_then(decoded), None, "byte {at}");
        }
        assert!(OpenRequest::new(&"x".repeat(NAME), 0).is_ok());
        assert!(OpenRequest::new(&"x".repeat(NAME + 1), 0).is_err());
        for answer in [Answer::NotServed, Answer::Follows(3), Answer::Unchanged(u64::MAX)] {
            assert_eq!(Answer::decode(&answer.encode()).ok(), Some(answer));
        }
        assert!(Answer::decode(&[3; Answer::BYTES]).is_err());
    }
}
