//! Messages with descriptors over a Unix socket, and what they say.
#![expect(unsafe_code, reason = "receives descriptors")]

use super::error::ShareError;
use aquifer_driver::Access;
use nix::{
    cmsg_space,
    sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg},
};
use std::{
    io::{self, IoSlice, IoSliceMut},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    str::FromStr,
};

/// The number of descriptors that Linux passes with one message (`SCM_MAX_FD`).
const MOST_DESCRIPTORS: usize = 253;
/// Bytes of a text in a message. The rest of a shorter one is zero.
const TEXT: usize = 256;
/// The maximum length of a name in bytes.
const NAME: usize = 64;
/// The first words of a header and of a request, with the version of the format.
const HEADER: &str = "aqshare-3";
const REQUEST: &str = "aqask-4";

/// What is said of a block before its memory follows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ShareHeader {
    /// Number of handles; 0 if a server sends no block.
    pub(super) handles: u64,
    /// The server's number of the block; 0 if it has none of the name, or is not a server.
    pub(super) generation: u64,
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
    /// Returns the answer of a server that sends no block.
    pub(super) fn without_block(name: String, generation: u64) -> Self {
        let (handles, granularity, offset, bytes) = (0, 0, 0, 0);
        let (access, device) = (Access::Read, String::new());
        Self { handles, generation, granularity, offset, bytes, access, device, name }
    }

    pub(super) fn send(&self, socket: &UnixStream) -> Result<(), ShareError> {
        let Self { handles, generation, granularity, offset, bytes, access, device, name } = self;
        let writes = u8::from(access.writes());
        let numbers = format!("{handles} {generation} {granularity} {offset} {bytes} {writes}");
        send_text(socket, &format!("{HEADER} {numbers} {device} {name}"))
    }

    pub(super) fn receive(socket: &UnixStream) -> Result<Self, ShareError> {
        let text = receive_text(socket, HEADER)?;
        let mut words = text.splitn(8, ' ');
        Ok(Self {
            handles: parse(words.next())?,
            generation: parse(words.next())?,
            granularity: parse(words.next())?,
            offset: parse(words.next())?,
            bytes: parse(words.next())?,
            access: if parse::<u8>(words.next())? == 0 { Access::Read } else { Access::ReadWrite },
            device: parse(words.next())?,
            name: parse(words.next())?,
        })
    }
}

fn parse<T: FromStr>(word: Option<&str>) -> Result<T, ShareError> {
    word.and_then(|word| word.parse().ok()).ok_or(ShareError::NotAShare)
}

/// Asks a server for the block of a name, or for its generation alone.
pub(super) fn send_request(
    socket: &UnixStream,
    name: &str,
    wants_block: bool,
) -> Result<(), ShareError> {
    check_name(name)?;
    send_text(socket, &format!("{REQUEST} {} {name}", u8::from(wants_block)))
}

/// Returns the name that an opener asks for, and whether it wants the block.
pub(super) fn receive_request(socket: &UnixStream) -> Result<(String, bool), ShareError> {
    let text = receive_text(socket, REQUEST)?;
    let mut words = text.splitn(2, ' ');
    let wants_block = parse::<u8>(words.next())? != 0;
    Ok((parse(words.next())?, wants_block))
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

fn send_text(socket: &UnixStream, text: &str) -> Result<(), ShareError> {
    let mut message = [0; TEXT];
    let Some(place) = message.get_mut(..text.len()) else { return Err(ShareError::NotAShare) };
    place.copy_from_slice(text.as_bytes());
    send(socket, &message, None)
}

/// Receives a text, and returns what follows its first word.
fn receive_text(socket: &UnixStream, first: &str) -> Result<String, ShareError> {
    let mut message = [0; TEXT];
    if receive(socket, &mut message)?.is_some() {
        return Err(ShareError::BadField { field: "the number of descriptors", value: 1 });
    }
    let text = str::from_utf8(&message).ok().map(|text| text.trim_end_matches('\0'));
    let rest = text.and_then(|text| text.strip_prefix(first)?.strip_prefix(' '));
    rest.map(str::to_owned).ok_or(ShareError::NotAShare)
}

/// Sends all of `bytes`, and the descriptor with the first of them. Blocks as the socket's timeouts
/// allow.
pub(super) fn send(
    socket: &UnixStream,
    bytes: &[u8],
    descriptor: Option<&OwnedFd>,
) -> Result<(), ShareError> {
    let raw: Vec<RawFd> = descriptor.iter().map(|file| file.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let mut sent = 0;
    while sent < bytes.len() {
        let control = if raw.is_empty() || sent > 0 { &[] } else { &rights[..] };
        let part = [IoSlice::new(&bytes[sent..])];
        match sendmsg::<()>(socket.as_raw_fd(), &part, control, MsgFlags::MSG_NOSIGNAL, None) {
            Err(nix::Error::EINTR) => {}
            count => sent += count.map_err(io::Error::from)?,
        }
    }
    Ok(())
}

/// Receives exactly as many bytes as there is room for, with at most one descriptor, which is
/// closed on `exec`. All descriptors are closed on failure. Blocks as the socket's timeouts allow.
pub(super) fn receive(
    socket: &UnixStream,
    bytes: &mut [u8],
) -> Result<Option<OwnedFd>, ShareError> {
    let (mut received, mut descriptors) = (0, Vec::new());
    // Room for all that a message can have, so that none is lost.
    let mut control = cmsg_space!([RawFd; MOST_DESCRIPTORS]);
    while received < bytes.len() {
        let mut part = [IoSliceMut::new(&mut bytes[received..])];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let socket = socket.as_fd().as_raw_fd();
        let message = match recvmsg::<()>(socket, &mut part, Some(&mut control), flags) {
            Err(nix::Error::EINTR) => continue,
            message => message.map_err(io::Error::from)?,
        };
        for found in message.cmsgs().map_err(|_| ShareError::DescriptorLimit)? {
            if let ControlMessageOwned::ScmRights(files) = found {
                // SAFETY: 1. The kernel has opened each for this call, and no other value owns it.
                let own = |file| unsafe { OwnedFd::from_raw_fd(file) };
                descriptors.extend(files.into_iter().map(own));
            }
        }
        if message.bytes == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        received += message.bytes;
    }
    match descriptors.len() {
        0 | 1 => Ok(descriptors.pop()),
        more => {
            Err(ShareError::BadField { field: "the number of descriptors", value: more as u64 })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn header() -> ShareHeader {
        ShareHeader {
            handles: 3,
            generation: u64::MAX,
            granularity: 2 << 20,
            offset: 512,
            bytes: 5 << 20,
            access: Access::ReadWrite,
            device: "0000:1b:00.0".into(),
            name: "the weights".into(),
        }
    }

    fn pair() -> (UnixStream, UnixStream) {
        UnixStream::pair().unwrap()
    }

    #[test]
    fn headers_and_requests_round_trip() {
        let (here, there) = pair();
        for access in [Access::Read, Access::ReadWrite] {
            for device in [String::new(), header().device] {
                let header = ShareHeader { access, device, ..header() };
                header.send(&here).unwrap();
                assert_eq!(ShareHeader::receive(&there).ok(), Some(header));
            }
        }
        for name in ["", "a name", &"x".repeat(NAME)] {
            for wants_block in [false, true] {
                send_request(&here, name, wants_block).unwrap();
                assert_eq!(receive_request(&there).ok(), Some((name.to_owned(), wants_block)));
            }
        }
        assert!(send_request(&here, &"x".repeat(NAME + 1), true).is_err());
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "aqshare-2 1 9 2 3 4 0 d n",
            "aqshare-3 1 9 2 3 4 0 d",
            "aqshare-3 -1 9 2 3 4 0 d n",
            "aqshare-3 1 9 2 3 18446744073709551616 0 d n",
            "aqshare-3 1 9 2 3 4 x d n",
            "aqask-4 n",
            "aqask-4 x n",
        ] {
            let (mut here, there) = pair();
            let mut message = [0; TEXT];
            message[..text.len()].copy_from_slice(text.as_bytes());
            here.write_all(&message).unwrap();
            assert!(matches!(ShareHeader::receive(&there), Err(ShareError::NotAShare)), "{text}");
            here.write_all(&message).unwrap();
            assert!(matches!(receive_request(&there), Err(ShareError::NotAShare)), "{text}");
        }
    }
}
