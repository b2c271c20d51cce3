//! Blocks that a process serves by name, and that other processes open.
//!
//! ```text
//!   opener:  magic, generation that it knows (or 0), name
//!   server:  whether it has one, its generation      then the message of `share`
//! ```
//!
//! Both sides refuse a process of another user, whatever the permissions of the socket's file. One
//! thread answers all openers, and waits for none of them: each step of an opener has a time limit,
//! and when all places are taken, the one that has the least time left has to go. An opener has one
//! limit for all steps. A request that is no request ends its connection only. Forked children have
//! none of the sockets.
#![expect(unsafe_code, reason = "imports memory that others work with")]

use super::{
    ReceivedBlock, SharedBlock,
    conversation::Conversation,
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
    collections::HashMap,
    fmt, io,
    mem::{self, ManuallyDrop},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::net::{SocketAddr, UnixListener},
    },
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// The most openers at one time.
const MOST_OPENERS: usize = 64;
/// The pause when the system refuses a socket or a wait. It may have what is missing later.
const PAUSE: Duration = Duration::from_millis(10);

/// Serves blocks by name to other processes of the same user, over a Unix socket.
///
/// One thread answers all openers, up to 64 at a time. One that stops or says nothing delays no
/// other: it is dropped after two seconds in one step, or when another one needs its place.
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
    blocks: Mutex<ServedBlocks>,
    is_over: AtomicBool,
}

/// The served blocks with their generations, by name.
struct ServedBlocks {
    last_generation: u64,
    by_name: HashMap<String, (u64, Arc<SharedBlock>)>,
}

impl Service {
    fn lock(&self) -> MutexGuard<'_, ServedBlocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers openers until the server is dropped. What was asked until then is answered.
    fn run(&self) {
        let mut openers = Vec::new();
        let Some(listener) = self.listener.get() else { return };
        loop {
            let is_over = self.is_over.load(Relaxed);
            if is_over {
                openers.retain(|opener: &Conversation| !opener.is_idle());
                if openers.is_empty() {
                    return;
                }
            }
            let (has_new, ready) = wait((!is_over).then(|| listener.as_fd()), &openers);
            let (now, mut ready) = (Instant::now(), ready.into_iter());
            // The opener may end, or what it says may be wrong: that is the same to the others.
            openers.retain_mut(|opener| {
                let advanced = match ready.next() {
                    Some(true) => opener.advance(|request| self.find(request)),
                    _ => Err(ShareError::TimedOut),
                };
                matches!(advanced, Err(ShareError::TimedOut)) && now < opener.deadline
            });
            if has_new {
                accept(listener, &mut openers);
            }
        }
    }

    fn find(&self, request: &OpenRequest) -> (Answer, Option<Arc<SharedBlock>>) {
        // A last reference is dropped by the caller, which may call the driver: not under the lock.
        match self.lock().by_name.get(&request.name) {
            None => (Answer::NotServed, None),
            Some((generation, _)) if *generation == request.known => {
                (Answer::Unchanged(*generation), None)
            }
            Some((generation, block)) => (Answer::Follows(*generation), Some(block.clone())),
        }
    }
}

/// Waits until a socket is ready, or the time of an opener is up. Returns whether there are new
/// openers, and of each opener whether it is ready.
fn wait(listener: Option<BorrowedFd<'_>>, openers: &[Conversation]) -> (bool, Vec<bool>) {
    let of = |opener: &Conversation| match opener.is_sending() {
        true => PollFlags::POLLOUT,
        false => PollFlags::POLLIN,
    };
    let of_openers = openers.iter().filter_map(|opener| Some((opener.fd()?, of(opener))));
    let of_listener = listener.map(|listener| (listener, PollFlags::POLLIN));
    let polled = of_openers.chain(of_listener).map(|(fd, events)| PollFd::new(fd, events));
    let mut polled: Vec<_> = polled.collect();
    let next = openers.iter().map(|opener| opener.deadline).min();
    let timeout = next.map_or(PollTimeout::NONE, |next| {
        let left = next.saturating_duration_since(Instant::now()).as_millis();
        // Rounded up, so that the time is up when the wait ends.
        PollTimeout::from(u16::try_from(left + 1).unwrap_or(u16::MAX))
    });
    match poll(&mut polled, timeout) {
        Ok(_) => {
            let mut ready: Vec<bool> =
                polled.iter().map(|polled| polled.any().unwrap_or(true)).collect();
            (listener.is_some() && ready.pop() == Some(true), ready)
        }
        Err(error) => {
            if error != nix::Error::EINTR {
                thread::sleep(PAUSE);
            }
            (false, Vec::new())
        }
    }
}

/// Accepts the openers that wait. Where there is no room, the one with the least time left goes.
fn accept(listener: &UnixListener, openers: &mut Vec<Conversation>) {
    let drop_oldest = |openers: &mut Vec<Conversation>| {
        let oldest = openers.iter().enumerate().min_by_key(|(_, opener)| opener.deadline);
        if let Some((oldest, _)) = oldest {
            openers.remove(oldest);
        }
    };
    for _ in 0..MOST_OPENERS {
        let accepted = Unforked::open(|| {
            let (socket, _) = listener.accept()?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        });
        match accepted {
            Ok(socket) if socket.get().is_some_and(|socket| check_peer(socket).is_ok()) => {
                if openers.len() == MOST_OPENERS {
                    drop_oldest(openers);
                }
                openers.push(Conversation::new(socket));
            }
            // A process of another user, which takes no place.
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(_) => {
                // No descriptors are left, for example.
                drop_oldest(openers);
                return thread::sleep(PAUSE);
            }
        }
    }
}

impl ShareServer {
    /// Binds a socket and starts the thread that answers. The address is a path, or a name in the
    /// abstract namespace, which is that of the network namespace. A file that a dead server has
    /// left at the path is replaced. Waits up to a second for other processes of this user that
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
        let blocks = Mutex::new(ServedBlocks { last_generation, by_name: HashMap::new() });
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
            let mut blocks = self.service.lock();
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
        let withdrawn = self.service.lock().by_name.remove(name);
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
        let withdrawn = mem::take(&mut self.service.lock().by_name);
        drop(withdrawn);
    }
}

/// Sends a request, and returns what the server says. The block follows on the connection.
fn ask(connection: &Connection<'_>, request: &OpenRequest) -> Result<Answer, ShareError> {
    connection.send(&request.encode(), &[])?;
    let mut answer = [0; Answer::BYTES];
    connection.receive(&mut answer, 0)?;
    Answer::decode(&answer)
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
        let request = OpenRequest::new(name, 0)?;
        let deadline = Instant::now() + timeout;
        let socket = connect(address, deadline)?;
        check_peer(&socket)?;
        let connection = Connection::new(&socket, Patience::Until(deadline));
        let Answer::Follows(generation) = ask(&connection, &request)? else {
            return Err(ShareError::NotServed { name: name.to_owned() });
        };
        // SAFETY: 1. 2. Promised by the caller.
        let mut received = unsafe { self.receive_over(stream, &connection) }?;
        received.opened_at(generation, address.clone());
        Ok(received)
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
        let request = OpenRequest::new(self.name(), self.generation())?;
        let deadline = Instant::now() + timeout;
        let socket = connect(address, deadline)?;
        check_peer(&socket)?;
        let connection = Connection::new(&socket, Patience::Until(deadline));
        Ok(matches!(ask(&connection, &request)?, Answer::Unchanged(_)))
    }
}

impl fmt::Debug for ShareServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShareServer")
            .field("address", &self.service.listener.get().and_then(|it| it.local_addr().ok()))
            .finish_non_exhaustive()
    }
}
