//! Blocks that a process serves by name, and that other processes open.
//!
//! ```text
//!   opener:  magic, generation that it knows (or 0), name
//!   server:  whether it has one, its generation      then the message of `share`
//! ```
//!
//! Both sides refuse a process of another user, whatever the permissions of the socket's file. Each
//! opener has a thread, and a time limit for each of its steps. When all places are taken, the
//! oldest has to go. An opener has one limit for all steps. A request that is no request ends its
//! connection only. Forked children have none of the sockets.
#![expect(unsafe_code, reason = "imports memory that others work with")]

use super::{
    ReceivedBlock, SharedBlock,
    error::ShareError,
    forks::Unforked,
    listener::{SocketFile, connect, listen},
    share::check_peer,
    wire::{Answer, Connection, OpenRequest, Patience},
};
use crate::DevicePool;
use aquifer_core::Result;
use aquifer_driver::site;
use aquifer_stream::Stream;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{Shutdown, shutdown},
};
use std::{
    collections::{HashMap, VecDeque},
    fmt, io,
    mem::{self, ManuallyDrop},
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// The most openers at one time.
const MOST_OPENERS: usize = 64;
/// How long an opener may take for each step.
const STEP: Duration = Duration::from_secs(2);
/// The pause when the system refuses a socket or a wait. It may have what is missing later.
const PAUSE: Duration = Duration::from_millis(10);

/// Serves blocks by name to other processes of the same user, over a Unix socket.
///
/// Up to 64 openers are answered at a time, by a thread each. One that stops or says nothing delays
/// no other: it is dropped after two seconds in one step, or when another one needs its place.
///
/// Dropping the server ends the service, and removes the socket's file. After a `SIGKILL` the file
/// is left, and the next server at its path replaces it. A child of a fork has no part in the
/// service, and ends with nothing of it: openers find [`ShareError::NoServer`] as soon as the
/// process that has bound the socket has died.
///
/// A block that an opener has mapped stays mapped there when it is withdrawn, when the server is
/// dropped, and when the process ends. The memory of a [`StableBlock`](crate::StableBlock) holds
/// nothing else, so the opener keeps its bytes. Other blocks are reused after their free: keep them
/// until every opener has closed.
///
/// ```
/// use aquifer::{
///     DeviceId, DevicePool, PoolConfig, Request, device::{ShareError, ShareServer},
///     driver::ExportTypes, sim::Sim,
/// };
/// use std::{os::unix::net::SocketAddr, time::Duration};
///
/// let sim = Sim::h200(1);
/// let mut config = PoolConfig::default();
/// config.export = ExportTypes::POSIX_FD;          // set before memory is created
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), config)?;
/// let stream = pool.stream()?;
/// let weights = pool.alloc_stable(&stream, Request::bytes(4 << 20))?;
///
/// # let path = std::env::temp_dir().join(format!("aquifer-serve-doc-{}", std::process::id()));
/// let address = SocketAddr::from_pathname(&path)?;
/// let server = ShareServer::bind(&address)?;
/// let generation = server.serve(pool.share(weights.block(), "weights")?.read_only());
///
/// // Another process, with a pool of its own.
/// let wait = Duration::from_secs(5);
/// // SAFETY: 1. No work writes the memory. 2. It is that of a stable block.
/// let opened = unsafe { pool.open_shared(&stream, &address, "weights", wait)? };
/// assert_eq!((opened.bytes(), opened.generation()), (4 << 20, generation));
/// assert!(opened.is_read_only() && opened.is_current(wait)?);
///
/// server.withdraw("weights");
/// assert!(!opened.is_current(wait)?);             // `opened` stays mapped
/// // SAFETY: 1. and 2. Nothing is opened.
/// let refused = unsafe { pool.open_shared(&stream, &address, "weights", wait) };
/// assert!(matches!(refused, Err(ShareError::NotServed { .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ShareServer {
    /// A forked child has a copy, without the thread and the socket.
    service: Arc<Service>,
}

/// What the thread of a server shares with its handle.
struct Service {
    listener: Unforked<UnixListener>,
    file: Option<SocketFile>,
    blocks: Arc<Mutex<ServedBlocks>>,
    is_over: AtomicBool,
}

/// The served blocks with their generations, by name.
struct ServedBlocks {
    last_generation: u64,
    by_name: HashMap<String, (u64, Arc<SharedBlock>)>,
}

fn lock(blocks: &Mutex<ServedBlocks>) -> MutexGuard<'_, ServedBlocks> {
    blocks.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Service {
    /// Accepts openers until the server is dropped. Each gets a thread. Where there is no room, the
    /// oldest has to go.
    fn run(&self) {
        let mut openers = VecDeque::new();
        let Some(listener) = self.listener.get() else { return };
        loop {
            let polled =
                poll(&mut [PollFd::new(listener.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE);
            if self.is_over.load(Relaxed) {
                // What was asked until then is answered.
                return;
            }
            openers.retain(|opener: &Weak<_>| opener.strong_count() > 0);
            let served = polled.map_err(io::Error::from).and_then(|_| self.accept(listener));
            match served {
                Ok(opener) => openers.extend(opener),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    // No descriptors or threads are left, for example.
                    drop_oldest(&mut openers);
                    thread::sleep(PAUSE);
                }
            }
            if openers.len() > MOST_OPENERS {
                drop_oldest(&mut openers);
            }
        }
    }

    /// Accepts an opener without waiting, and starts its thread. Returns `None` for a process of
    /// another user, which takes no place.
    fn accept(&self, listener: &UnixListener) -> io::Result<Option<Weak<Unforked<UnixStream>>>> {
        let opener = Arc::new(Unforked::open(|| listener.accept().map(|(socket, _)| socket))?);
        if opener.get().is_none_or(|socket| check_peer(socket).is_err()) {
            return Ok(None);
        }
        let (place, blocks) = (Arc::downgrade(&opener), self.blocks.clone());
        let thread = thread::Builder::new().name("aquifer-share".into());
        // The opener may end, or what it says may be wrong: that is the same to the others.
        thread.spawn(move || opener.get().map(|socket| answer(&blocks, socket)))?;
        Ok(Some(place))
    }
}

/// Answers an opener. Each step has a time limit.
fn answer(blocks: &Mutex<ServedBlocks>, socket: &UnixStream) -> Result<(), ShareError> {
    let connection = Connection::new(socket, Patience::Each(STEP));
    let mut message = [0; OpenRequest::BYTES];
    connection.receive(&mut message, 0)?;
    let request = OpenRequest::decode(&message)?;
    // A last reference is dropped here, which may call the driver: not under the lock.
    let found = lock(blocks).by_name.get(&request.name).cloned();
    let (answer, block) = match found {
        None => (Answer::NotServed, None),
        Some((known, _)) if known == request.known => (Answer::Unchanged(known), None),
        Some((generation, block)) => (Answer::Follows(generation), Some(block)),
    };
    connection.send(&answer.encode(), &[])?;
    block.map_or(Ok(()), |block| block.send_over(&connection))
}

/// Ends the connection that has lasted longest, and with it its thread.
fn drop_oldest(openers: &mut VecDeque<Weak<Unforked<UnixStream>>>) {
    let oldest = openers.pop_front().and_then(|opener| opener.upgrade());
    if let Some(socket) = oldest.as_ref().and_then(|opener| opener.get()) {
        let _ended = socket.shutdown(std::net::Shutdown::Both);
    }
}

impl ShareServer {
    /// Binds a socket and starts the thread that accepts openers. The address is a path, or a name
    /// in the abstract namespace, which is that of the network namespace. A file that a dead server
    /// has left at the path is replaced. Waits up to a second for other processes of this user that
    /// bind at the same path. Meanwhile there is a file next to it, whose name ends in `.lock`.
    ///
    /// # Errors
    /// [`ShareError::Io`], such as [`AddrInUse`](std::io::ErrorKind::AddrInUse) if another process
    /// serves there, and [`AlreadyExists`](std::io::ErrorKind::AlreadyExists) if the path is no
    /// socket; [`ShareError::TimedOut`].
    pub fn bind(address: &SocketAddr) -> Result<Self, ShareError> {
        let (listener, file) = listen(address)?;
        // Larger than those of an earlier server, unless the clock was set back.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let last_generation = u64::try_from(since.as_nanos()).unwrap_or_default();
        let blocks = ServedBlocks { last_generation, by_name: HashMap::new() };
        let blocks = Arc::new(Mutex::new(blocks));
        let is_over = AtomicBool::new(false);
        let service = Arc::new(Service { listener, file, blocks, is_over });
        let server = Self { service: service.clone() };
        thread::Builder::new().name("aquifer-share".into()).spawn(move || service.run())?;
        Ok(server)
    }

    /// Serves a block under [its name](SharedBlock::name), instead of the one served under it
    /// before. Returns its generation, which no other block that this server serves has, nor an
    /// earlier server's at this address unless the clock was set back.
    ///
    /// The server keeps the memory charged until the block is withdrawn.
    pub fn serve(&self, block: SharedBlock) -> u64 {
        let name = block.name().to_owned();
        let (generation, replaced) = {
            let mut blocks = lock(&self.service.blocks);
            blocks.last_generation += 1;
            let generation = blocks.last_generation;
            (generation, blocks.by_name.insert(name, (generation, Arc::new(block))))
        };
        // The last reference calls the driver: not under the lock.
        drop(replaced);
        generation
    }

    /// Ends the service of a block: later openers get [`ShareError::NotServed`]. Those that have
    /// mapped it keep it. Returns its generation, or `None` if there is none of this name.
    pub fn withdraw(&self, name: &str) -> Option<u64> {
        let withdrawn = lock(&self.service.blocks).by_name.remove(name);
        withdrawn.map(|(generation, _)| generation)
    }

    /// Returns whether this is the process that has bound the socket, and not a child of a fork.
    #[must_use]
    pub fn is_of_this_process(&self) -> bool {
        self.service.listener.is_of_this_process()
    }
}

impl Drop for ShareServer {
    /// Neither waits for the thread nor blocks. A transfer that has begun goes on.
    fn drop(&mut self) {
        let Some(listener) = self.service.listener.get() else {
            // The file and the memory are the parent's, and the lock may be held by a thread that a
            // forked child does not have.
            let _kept = ManuallyDrop::new(self.service.clone());
            return;
        };
        self.service.is_over.store(true, Relaxed);
        if let Some(file) = &self.service.file {
            file.remove();
        }
        // On Linux this wakes the thread that waits.
        let _woken = shutdown(listener.as_raw_fd(), Shutdown::Both);
        let withdrawn = mem::take(&mut lock(&self.service.blocks).by_name);
        drop(withdrawn);
    }
}

/// Asks a server for the block of a name, unless it has the generation `known`. Returns what it
/// says, and what `follow` makes of what follows on the connection. It takes at most `timeout`.
fn ask<T>(
    address: &SocketAddr,
    (name, known): (&str, u64),
    timeout: Duration,
    follow: impl FnOnce(Answer, &Connection<'_>) -> Result<T, ShareError>,
) -> Result<T, ShareError> {
    let request = OpenRequest::new(name, known)?;
    let deadline = Instant::now() + timeout;
    let socket = connect(address, deadline)?;
    check_peer(&socket)?;
    let connection = Connection::new(&socket, Patience::Until(deadline));
    connection.send(&request.encode(), &[])?;
    let mut answer = [0; Answer::BYTES];
    connection.receive(&mut answer, 0)?;
    follow(Answer::decode(&answer)?, &connection)
}

impl DevicePool {
    /// Opens a block that another process [serves](ShareServer) under `name`, and maps it in one
    /// piece for work on `stream` from now on. It takes at most `timeout`. See [`ShareServer`] for
    /// an example.
    ///
    /// # Safety
    /// As [`DevicePool::receive`]. In 2., memory of a [`StableBlock`](crate::StableBlock) may
    /// outlive the sender's block.
    ///
    /// # Errors
    /// - [`ShareError::NoServer`] if no process serves at the address; [`ShareError::NotServed`] if
    ///   it has no block of this name, or has withdrawn it; [`ShareError::TimedOut`].
    /// - [`ShareError::OtherUser`] if the server belongs to another user.
    /// - As [`DevicePool::receive`].
    #[track_caller]
    pub unsafe fn open_shared(
        &self,
        stream: &Stream,
        address: &SocketAddr,
        name: &str,
        timeout: Duration,
    ) -> Result<ReceivedBlock, ShareError> {
        let _site = site::enter();
        ask(address, (name, 0), timeout, |answer, connection| {
            let Answer::Follows(generation) = answer else {
                return Err(ShareError::NotServed { name: name.to_owned() });
            };
            // SAFETY: 1. 2. Promised by the caller.
            let mut received = unsafe { self.receive_over(stream, connection) }?;
            received.opened_at(generation, address.clone());
            Ok(received)
        })
    }
}

impl ReceivedBlock {
    /// Asks the server whether it still serves this block: not after it has withdrawn the name, or
    /// serves another block under it. It takes at most `timeout`.
    ///
    /// # Errors
    /// [`ShareError::NoServer`]; [`ShareError::NotServed`] for a block that was not opened by name;
    /// [`ShareError::TimedOut`]; [`ShareError::Io`].
    pub fn is_current(&self, timeout: Duration) -> Result<bool, ShareError> {
        let Some(address) = self.server() else {
            return Err(ShareError::NotServed { name: self.name().to_owned() });
        };
        ask(address, (self.name(), self.generation()), timeout, |answer, _| {
            Ok(matches!(answer, Answer::Unchanged(_)))
        })
    }
}

impl fmt::Debug for ShareServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShareServer")
            .field("address", &self.service.listener.get().and_then(|it| it.local_addr().ok()))
            .finish_non_exhaustive()
    }
}
