//! Blocks that a process serves by name, and that other processes open.
//!
//! An opener sends the name, and the server the message of `share`, or a header without handles if
//! it has no such block, or was asked for the generation alone.
//! Both sides refuse a process of another user, whatever the permissions of the socket's file. Each
//! opener has a thread, and a time limit for each of its steps. A request that is no request ends
//! its connection only.
#![expect(unsafe_code, reason = "imports memory that others work with")]

use super::{
    ReceivedBlock, SharedBlock,
    error::ShareError,
    share::check_peer,
    wire::{ShareHeader, receive_request, send_request},
};
use crate::DevicePool;
use aquifer_core::Result;
use aquifer_driver::site;
use aquifer_stream::Stream;
use nix::sys::socket::{
    AddressFamily, Shutdown, SockFlag, SockType, UnixAddr, connect, shutdown, socket,
};
use std::{
    collections::HashMap,
    fmt, fs, io,
    mem::{self, ManuallyDrop},
    os::{
        fd::AsRawFd,
        linux::net::SocketAddrExt,
        unix::{
            fs::FileTypeExt,
            net::{SocketAddr, UnixListener, UnixStream},
        },
    },
    process,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// How long an opener may take for each step.
const STEP: Duration = Duration::from_secs(2);
/// The pause when the system refuses a socket or a thread. It may have what is missing later.
const PAUSE: Duration = Duration::from_millis(10);

/// Serves blocks by name to other processes of the same user, over a Unix socket.
///
/// Each opener is answered by a thread. One that stops or says nothing delays no other, and is
/// dropped after two seconds in one step.
///
/// Dropping the server ends the service. The socket's file is left, as after a `SIGKILL`, and the
/// next server at its path replaces it. A child of a fork has no part in the service, but the
/// socket stays open as long as it lives: after the death of the process that has bound it, openers
/// find [`ShareError::TimedOut`] instead of [`ShareError::NoServer`].
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
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ShareServer {
    /// A forked child has a copy, without the thread.
    service: Arc<Service>,
}

/// What the thread of a server shares with its handle.
struct Service {
    listener: UnixListener,
    /// The process that has bound the socket.
    process: u32,
    last_generation: AtomicU64,
    blocks: Arc<Mutex<ServedBlocks>>,
    is_over: AtomicBool,
}

/// The served blocks by name.
type ServedBlocks = HashMap<String, Arc<SharedBlock>>;

fn lock(blocks: &Mutex<ServedBlocks>) -> MutexGuard<'_, ServedBlocks> {
    blocks.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Service {
    /// Accepts openers until the server is dropped. Each gets a thread.
    fn run(&self) {
        loop {
            let accepted = self.listener.accept();
            if self.is_over.load(Relaxed) {
                return;
            }
            if accepted.and_then(|(socket, _)| self.serve(socket)).is_err() {
                // No descriptors or threads are left, for example.
                thread::sleep(PAUSE);
            }
        }
    }

    /// Starts the thread of an opener. A process of another user gets none.
    fn serve(&self, socket: UnixStream) -> io::Result<()> {
        if check_peer(&socket).is_err() {
            return Ok(());
        }
        let blocks = self.blocks.clone();
        let thread = thread::Builder::new().name("aquifer-share".into());
        // The opener may end, or what it says may be wrong: that is the same to the others.
        thread.spawn(move || answer(&blocks, &socket)).map(drop)
    }
}

/// Answers an opener. Each step has a time limit.
fn answer(blocks: &Mutex<ServedBlocks>, socket: &UnixStream) -> Result<(), ShareError> {
    set_timeouts(socket, STEP)?;
    let (name, wants_block) = receive_request(socket)?;
    // A last reference is dropped here, which may call the driver: not under the lock.
    let found = lock(blocks).get(&name).cloned();
    match found {
        Some(block) if wants_block => block.send(socket),
        found => {
            let generation = found.map_or(0, |block| block.header.generation);
            ShareHeader::without_block(name, generation).send(socket)
        }
    }
}

/// Connects to a server, and asks for the block of a name or for its generation alone.
fn ask(
    address: &SocketAddr,
    (name, wants_block): (&str, bool),
    timeout: Duration,
) -> Result<UnixStream, ShareError> {
    let to = match address.as_pathname() {
        Some(path) => UnixAddr::new(path),
        None => UnixAddr::new_abstract(address.as_abstract_name().unwrap_or_default()),
    };
    let to = to.map_err(io::Error::from)?;
    let new = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None);
    let socket = UnixStream::from(new.map_err(io::Error::from)?);
    // Before it connects: the system makes it wait while many others do.
    set_timeouts(&socket, timeout)?;
    connect(socket.as_raw_fd(), &to).map_err(|error| match error {
        nix::Error::ECONNREFUSED | nix::Error::ENOENT => ShareError::NoServer(error.into()),
        _ => io::Error::from(error).into(),
    })?;
    check_peer(&socket)?;
    send_request(&socket, name, wants_block)?;
    Ok(socket)
}

fn set_timeouts(socket: &UnixStream, timeout: Duration) -> io::Result<()> {
    socket.set_read_timeout(Some(timeout))?;
    socket.set_write_timeout(Some(timeout))
}

/// Binds a socket. A file that a dead server has left at the path is replaced.
fn listen(address: &SocketAddr) -> io::Result<UnixListener> {
    match (UnixListener::bind_addr(address), address.as_pathname()) {
        (Err(error), Some(path)) if error.kind() == io::ErrorKind::AddrInUse => {
            let is_socket = fs::symlink_metadata(path)?.file_type().is_socket();
            let connected = UnixStream::connect_addr(address).map(drop);
            match connected.map_err(|error| error.kind()) {
                Err(io::ErrorKind::ConnectionRefused) if is_socket => fs::remove_file(path)?,
                _ => return Err(error),
            }
            UnixListener::bind_addr(address)
        }
        (bound, _) => bound,
    }
}

impl ShareServer {
    /// Binds a socket and starts the thread that accepts openers. The address is a path, or a name
    /// in the abstract namespace, which is that of the network namespace. A socket that a dead
    /// server has left at the path is replaced: do not start two servers at one path at the same
    /// time.
    ///
    /// # Errors
    /// [`ShareError::Io`], such as [`AddrInUse`](std::io::ErrorKind::AddrInUse) if another process
    /// serves there, or the path is not a socket.
    pub fn bind(address: &SocketAddr) -> Result<Self, ShareError> {
        let (listener, process) = (listen(address)?, process::id());
        // Larger than those of an earlier server, unless the clock was set back.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let last_generation = AtomicU64::new(since.as_nanos() as u64);
        let (blocks, is_over) = (Arc::default(), AtomicBool::new(false));
        let service = Arc::new(Service { listener, process, last_generation, blocks, is_over });
        let server = Self { service: service.clone() };
        thread::Builder::new().name("aquifer-share".into()).spawn(move || service.run())?;
        Ok(server)
    }

    /// Serves a block under [its name](SharedBlock::name), instead of the one served under it
    /// before. Returns its generation, which no other block that this server serves has, nor an
    /// earlier server's at this address unless the clock was set back.
    ///
    /// The server keeps the memory charged until the block is withdrawn.
    pub fn serve(&self, mut block: SharedBlock) -> u64 {
        let generation = self.service.last_generation.fetch_add(1, Relaxed) + 1;
        block.header.generation = generation;
        let (name, block) = (block.name().to_owned(), Arc::new(block));
        let replaced = lock(&self.service.blocks).insert(name, block);
        // The last reference calls the driver: not under the lock.
        drop(replaced);
        generation
    }

    /// Ends the service of a block: later openers get [`ShareError::NotServed`]. Those that have
    /// mapped it keep it. Returns whether there was one of this name.
    pub fn withdraw(&self, name: &str) -> bool {
        let withdrawn = lock(&self.service.blocks).remove(name);
        withdrawn.is_some()
    }
}

impl Drop for ShareServer {
    /// Neither waits for the thread nor blocks. A transfer that has begun goes on.
    fn drop(&mut self) {
        if self.service.process != process::id() {
            // The socket and the memory are the parent's, and the lock may be held by a thread that
            // a forked child does not have.
            let _kept = ManuallyDrop::new(self.service.clone());
            return;
        }
        self.service.is_over.store(true, Relaxed);
        // On Linux this wakes the thread that waits.
        let _woken = shutdown(self.service.listener.as_raw_fd(), Shutdown::Both);
        let withdrawn = mem::take(&mut *lock(&self.service.blocks));
        drop(withdrawn);
    }
}

impl DevicePool {
    /// Opens a block that another process [serves](ShareServer) under `name`, and maps it in one
    /// piece for work on `stream` from now on. Waits for a server that says nothing at most
    /// `timeout`, which may not be zero. See [`ShareServer`] for an example.
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
        let socket = ask(address, (name, true), timeout)?;
        // SAFETY: 1. 2. Promised by the caller.
        let mut received = unsafe { self.receive(stream, &socket) }?;
        received.server = Some(address.clone());
        Ok(received)
    }
}

impl ReceivedBlock {
    /// Asks the server whether it still serves this block: not after it has withdrawn the name, or
    /// serves another block under it. Waits as [`DevicePool::open_shared`].
    ///
    /// # Errors
    /// [`ShareError::NoServer`]; [`ShareError::NotServed`] for a block that was not opened by name;
    /// [`ShareError::TimedOut`]; [`ShareError::Io`].
    pub fn is_current(&self, timeout: Duration) -> Result<bool, ShareError> {
        let missing = || ShareError::NotServed { name: self.name().to_owned() };
        let server = self.server.as_ref().ok_or_else(missing)?;
        let socket = ask(server, (self.name(), false), timeout)?;
        Ok(ShareHeader::receive(&socket)?.generation == self.generation())
    }
}

impl fmt::Debug for ShareServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShareServer")
            .field("address", &self.service.listener.local_addr().ok())
            .finish_non_exhaustive()
    }
}
