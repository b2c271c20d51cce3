//! Programs over the messages by which processes share blocks: what a stranger sends to a
//! [`ShareServer`], and what a server answers to an opener.
//!
//! Messages are mutated, truncated and cut into pieces, and come with too few descriptors, too
//! many, or those of something else.
//!
//! Invariants after every operation:
//!
//! - every message ends with an answer, a closed connection or an error with a type, in time;
//! - the server still serves, with the generations that it told;
//! - no copy of a descriptor that was sent stays open;
//! - a message that was not changed is opened, with the bytes of its block.
//!
//! At the end nothing is mapped and no handle is left.
#![expect(unsafe_code, reason = "opens memory that others work with")]
#![expect(clippy::expect_used, clippy::panic, reason = "a broken promise is told by a panic")]

use crate::{
    program::{Bytes, Process, Program},
    rig::assert_silent,
};
use aquifer_core::Budget;
use aquifer_device::{
    Block, DevicePool, PoolConfig, ReceivedBlock, Request, ShareError, ShareServer, StableBlock,
};
use aquifer_driver::{DeviceId, ExportTypes, PhysicalHandle, sim::Sim};
use aquifer_stream::Stream;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use std::{
    fs,
    io::{self, IoSlice, Read},
    net::Shutdown,
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        linux::net::SocketAddrExt,
        unix::{
            fs::MetadataExt,
            net::{SocketAddr, UnixListener, UnixStream},
        },
    },
    process,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

/// No side waits for so long, because the other one closes the connection.
const SOON: Duration = Duration::from_secs(20);
const CAPACITY: u64 = 512 << 20;
/// Physical handles of the pool.
const UNIT: u64 = 2 << 20;
/// Handles of a large block, and the number that is sent without an answer.
const HANDLES: usize = 66;
const BATCH: usize = 64;
/// The names of the served blocks, and one that is not served.
const NAMES: [&str; 3] = ["small", "large", "absent"];

/// A descriptor that is sent. How many of this process are open on the same file can be counted,
/// whatever other threads open.
struct Sent {
    descriptor: OwnedFd,
    identity: (u64, u64),
}

fn identity_of(descriptor: RawFd) -> io::Result<(u64, u64)> {
    fs::metadata(format!("/proc/self/fd/{descriptor}")).map(|found| (found.dev(), found.ino()))
}

impl Sent {
    fn new(descriptor: OwnedFd) -> Self {
        let identity = identity_of(descriptor.as_raw_fd()).expect("it is open");
        Self { descriptor, identity }
    }

    /// Returns one end of a pipe, which is no memory.
    fn of_something_else() -> Self {
        let (_, write) = io::pipe().expect("a pipe");
        Self::new(write.into())
    }

    fn is_closed_elsewhere(&self) -> bool {
        let open = fs::read_dir("/proc/self/fd").expect("the descriptors of this process");
        let same = open.flatten().filter(|entry| {
            // A descriptor that another thread has closed meanwhile is none of these.
            let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
            number.is_some_and(|number| identity_of(number).ok() == Some(self.identity))
        });
        same.count() == 1
    }
}

/// Waits until `is_so`.
fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < SOON, "{what}");
        thread::sleep(Duration::from_micros(100));
    }
}

/// A message with its descriptors, and the number of pieces it is sent in.
struct Message {
    bytes: Vec<u8>,
    sent: Vec<Sent>,
    pieces: usize,
}

impl Message {
    fn new(bytes: Vec<u8>, sent: Vec<Sent>) -> Self {
        Self { bytes, sent, pieces: 1 }
    }

    /// Changes the message as the program says. Returns whether it says another thing now.
    fn mutate(&mut self, bytes: &mut Bytes<'_>) -> bool {
        let (before, count) = (self.bytes.clone(), self.sent.len());
        self.pieces = 1 + usize::from(bytes.choice(3));
        for _ in 0..bytes.choice(4) {
            self.mutate_once(bytes);
        }
        let mut changed = self.bytes != before;
        match bytes.choice(8) {
            0 => self.sent.push(Sent::of_something_else()),
            1 => drop(self.sent.pop()),
            2 if count > 0 => {
                self.sent[usize::from(bytes.u8()) % count] = Sent::of_something_else();
            }
            3 => {
                let more = usize::from(bytes.choice(20));
                self.sent.extend((0..more).map(|_| Sent::of_something_else()));
                changed |= more > 0;
            }
            _ => return changed,
        }
        changed || count > 0 || !self.sent.is_empty()
    }

    fn mutate_once(&mut self, bytes: &mut Bytes<'_>) {
        let len = self.bytes.len().max(1);
        let at = usize::from(bytes.u16()) % len;
        let values = [0, 1, 2, u64::MAX, u64::MAX - 1, 1 << 63, UNIT, UNIT - 1, CAPACITY, 65];
        match bytes.choice(6) {
            0 => self.bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << (at % 8)),
            1 => self.bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte = !*byte),
            2 | 3 => {
                let value = values[usize::from(bytes.choice(values.len() as u8))].to_le_bytes();
                let place = self.bytes.iter_mut().skip(at / 8 * 8);
                place.zip(value).for_each(|(byte, value)| *byte = value);
            }
            4 => self.bytes.truncate(at),
            _ => self.bytes.extend((0..bytes.choice(200)).map(|byte| byte ^ at as u8)),
        }
    }

    /// Sends it. The other end may have closed.
    fn send(&self, socket: &UnixStream) {
        let raw: Vec<RawFd> = self.sent.iter().map(|sent| sent.descriptor.as_raw_fd()).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let size = self.bytes.len().div_ceil(self.pieces).max(1);
        for (number, piece) in self.bytes.chunks(size).enumerate() {
            let control = if number == 0 && !raw.is_empty() { &rights[..] } else { &[] };
            let part = [IoSlice::new(piece)];
            let socket = socket.as_raw_fd();
            if sendmsg::<()>(socket, &part, control, MsgFlags::MSG_NOSIGNAL, None).is_err() {
                return;
            }
        }
    }
}

/// A text, as it is sent.
fn text(text: &str) -> Vec<u8> {
    let mut message = text.as_bytes().to_vec();
    message.resize(256, 0);
    message
}

/// What an opener asks.
fn request(name: &str, wants_block: bool) -> Vec<u8> {
    text(&format!("aqask-4 {} {name}", u8::from(wants_block)))
}

pub(crate) struct World {
    sim: Sim,
    pool: DevicePool,
    stream: Stream,
    server: ShareServer,
    address: SocketAddr,
    /// A server whose answers are those of the program.
    other: UnixListener,
    other_address: SocketAddr,
    small: StableBlock,
    large: Block,
    /// Memory that the other server sends.
    sent: PhysicalHandle,
    /// The generations of the served blocks.
    generations: [u64; 2],
    opened: Vec<ReceivedBlock>,
}

/// Returns an address that no other program of this machine has.
fn new_address() -> SocketAddr {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("aquifer-fuzz-share-{}-{number}", process::id());
    SocketAddr::from_abstract_name(name).expect("a short name")
}

impl Program for World {
    const PROCESS: Process = Process::Shared;
    /// Each operation is a conversation of two threads.
    const MOST: usize = 60;

    fn open(_: &mut Bytes<'_>) -> Option<Self> {
        let sim = Sim::h200(1).symbolic().capacity(CAPACITY);
        let mut config = PoolConfig::with_budget(Budget::new("the fuzzed device", CAPACITY));
        config.export = ExportTypes::POSIX_FD;
        config.shareable = true;
        config.handle_bytes = UNIT;
        let pool = DevicePool::open(sim.driver(), DeviceId(0), config).expect("an idle device");
        let stream = pool.stream().expect("a stream of an idle device");
        let small = pool.alloc_stable(&stream, Request::bytes(UNIT / 2)).expect("there is room");
        let large = Request::bytes(HANDLES as u64 * UNIT);
        let large = pool.alloc(&stream, large).expect("there is room");
        let sent = sim.driver().handle_create(DeviceId(0), UNIT, ExportTypes::POSIX_FD);
        let sent = sent.expect("there is room");
        let (address, other_address) = (new_address(), new_address());
        let server = ShareServer::bind(&address).expect("a new address");
        let share = |block: &Block, name| pool.share(block, name).expect("it is for export");
        let shared = [share(small.block(), NAMES[0]).read_only(), share(&large, NAMES[1])];
        assert!(shared[1].handles() > BATCH, "an answer is awaited");
        let generations = shared.map(|block| server.serve(block));
        let other = UnixListener::bind_addr(&other_address).expect("a new address");
        Some(Self {
            sim,
            pool,
            stream,
            server,
            address,
            other,
            other_address,
            small,
            large,
            sent,
            generations,
            opened: Vec::new(),
        })
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.choice(8) {
            0..=2 => self.stranger(bytes),
            3..=5 => self.other_server(bytes),
            6 => self.open_one(bytes),
            _ => {
                if let Some(opened) = bytes.take(&mut self.opened) {
                    opened.close().expect("an idle device");
                }
            }
        }
    }

    /// Checks that the server serves, and that blocks that are open are known to it.
    fn check(&mut self) {
        let mut socket = UnixStream::connect_addr(&self.address).expect("the server listens");
        socket.set_read_timeout(Some(SOON)).expect("a socket");
        Message::new(request(NAMES[0], true), Vec::new()).send(&socket);
        let mut answer = [0; 256];
        socket.read_exact(&mut answer).expect("the server answers");
        let expected = format!("aqshare-3 1 {} ", self.generations[0]);
        assert!(answer.starts_with(expected.as_bytes()), "the block is there");
        for opened in &self.opened {
            assert!(opened.is_current(SOON).expect("the server answers"));
        }
    }

    fn finish(self) {
        let Self { sim, pool, stream, server, small, large, sent, opened, .. } = self;
        opened.into_iter().for_each(|opened| _ = opened.close().expect("an idle device"));
        drop((server, small, large, stream));
        // The server's thread may still end its last conversation.
        soon("something is left of the device", || {
            pool.trim(0).expect("an idle device");
            pool.stats().physical == 0
        });
        drop(pool);
        // SAFETY: 1. It is not mapped, and nothing else has it.
        unsafe { sim.driver().handle_release(sent) }.expect("it is a handle");
        soon("something is left of the device", || sim.outstanding().is_empty());
        assert_silent(&sim);
    }
}

impl World {
    fn open_at(&self, address: &SocketAddr, name: &str) -> Result<ReceivedBlock, ShareError> {
        // SAFETY: 1. No work is queued. 2. The blocks live until the end of the program.
        unsafe { self.pool.open_shared(&self.stream, address, name, SOON) }
    }

    /// Opens a block as it should be.
    fn open_one(&mut self, bytes: &mut Bytes<'_>) {
        let which = usize::from(bytes.choice(3));
        match self.open_at(&self.address, NAMES[which]) {
            Ok(opened) => {
                let bytes = [self.small.bytes(), self.large.bytes()][which];
                assert_eq!((opened.bytes(), opened.generation()), (bytes, self.generations[which]));
                assert_eq!(opened.is_read_only(), which == 0);
                if self.opened.len() < 3 {
                    self.opened.push(opened);
                }
            }
            Err(ShareError::NotServed { .. }) if which == 2 => {}
            Err(error) => panic!("{}: {error}", NAMES[which]),
        }
    }

    /// Sends a request that may be anything, and perhaps an answer to what follows.
    fn stranger(&self, bytes: &mut Bytes<'_>) {
        let socket = UnixStream::connect_addr(&self.address).expect("the server listens");
        socket.set_read_timeout(Some(SOON)).expect("a socket");
        let name = NAMES[usize::from(bytes.choice(3))];
        let mut message = Message::new(request(name, bytes.choice(4) > 0), Vec::new());
        message.mutate(bytes);
        message.send(&socket);
        let mut messages = vec![message];
        for _ in 0..bytes.choice(3) {
            let mut answer = Message::new(vec![0], Vec::new());
            answer.mutate(bytes);
            answer.send(&socket);
            messages.push(answer);
        }
        if bytes.flag() {
            // The server writes until it waits, which it cannot do.
            let _gone = socket.shutdown(Shutdown::Write);
            let mut rest = Vec::new();
            let ended = (&socket).read_to_end(&mut rest);
            let kind = ended.err().map(|error| error.kind());
            assert!(kind.is_none_or(|kind| kind != io::ErrorKind::WouldBlock), "it does not end");
        }
        drop(socket);
        Self::check_closed(&messages);
    }

    fn check_closed(messages: &[Message]) {
        for sent in messages.iter().flat_map(|message| &message.sent) {
            soon("a descriptor stays open", || sent.is_closed_elsewhere());
        }
    }

    fn export(&self) -> Sent {
        Sent::new(self.sim.driver().handle_export(self.sent).expect("it is for export"))
    }

    /// Opens a block at a server that answers anything.
    fn other_server(&self, bytes: &mut Bytes<'_>) {
        let info = self.pool.info();
        let handles = if bytes.choice(4) == 0 { HANDLES } else { 1 + usize::from(bytes.choice(3)) };
        let size = UNIT * handles as u64 - 512;
        let device = info.pci_address.as_deref().unwrap_or_default();
        let numbers = format!("{handles} 77 {} 0 {size} 1", info.granularity);
        let header = text(&format!("aqshare-3 {numbers} {device} {}", NAMES[0]));
        let mut messages = vec![Message::new(header, Vec::new())];
        messages.extend(
            (0..handles).map(|_| Message::new(UNIT.to_le_bytes().to_vec(), vec![self.export()])),
        );
        let mut changed = false;
        if bytes.choice(6) > 0 {
            let which = usize::from(bytes.u8()) % messages.len();
            changed = messages[which].mutate(bytes);
            if bytes.choice(3) == 0 {
                changed |= messages[0].mutate(bytes);
            }
        }
        // The last messages may be missing.
        if bytes.choice(6) == 0 {
            messages.truncate(usize::from(bytes.u8()) % messages.len());
            changed = true;
        }
        let opened = thread::scope(|threads| {
            let answers = threads.spawn(|| {
                let (socket, _) = self.other.accept().expect("an opener connects");
                socket.set_read_timeout(Some(SOON)).expect("a socket");
                let mut asked = vec![0; request(NAMES[0], true).len()];
                (&socket).read_exact(&mut asked).expect("an opener asks");
                assert_eq!(asked, request(NAMES[0], true));
                for (number, message) in messages.iter().enumerate() {
                    // The opener acknowledges each batch but the last. One that waits for the rest
                    // of a message does not, so that only a good server waits for it.
                    if number > 1 && (number - 1) % BATCH == 0 && !changed {
                        (&socket).read_exact(&mut [0]).expect("an opener acknowledges");
                    }
                    message.send(&socket);
                }
            });
            let opened = self.open_at(&self.other_address, NAMES[0]);
            answers.join().expect("a server of this program");
            opened
        });
        match opened {
            Ok(opened) => {
                assert!(opened.bytes() > 0 && opened.bytes() <= handles as u64 * UNIT);
                assert!(changed || (opened.bytes(), opened.generation()) == (size, 77));
                opened.close().expect("an idle device");
            }
            Err(ShareError::TimedOut) => panic!("the opener waits for a server that has closed"),
            Err(error) => assert!(changed, "a good message: {error}"),
        }
        Self::check_closed(&messages);
    }
}
