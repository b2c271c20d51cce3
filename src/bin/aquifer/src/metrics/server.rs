//! The server: a thread for each client, within bounds of time, size and number.
//!
//! - A client has to send its request within 5 s, and to receive the answer within 15 s.
//! - When all places are taken, the client that came first has to go, so that slow clients cannot
//!   keep others out.
//! - One reading of all processes serves all clients that asked before it began.
//! - It ends by SIGINT, SIGTERM or SIGHUP.

use super::request::{self, Answer, MOST_BYTES};
use crate::listen_address::ListenAddress;
use aquifer_benches::console::foreign::printable;
use aquifer_status::StatusError;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::stat::{Mode, umask},
};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
};
use std::{
    collections::VecDeque,
    fs,
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Most clients at one time.
const MOST_CLIENTS: usize = 64;
/// How long a client may take to send its request.
const REQUEST_TIME: Duration = Duration::from_secs(5);
/// How long a client may take to receive the answer.
const ANSWER_TIME: Duration = Duration::from_secs(15);
/// How long the server waits for the client to close. Without that, bytes which the client still
/// sends could reset the connection before it has read the answer.
const DRAIN_TIME: Duration = Duration::from_secs(1);
/// How long `poll` sleeps at most. A signal that arrives right before it waits this long.
const PAUSE_MS: u16 = 100;
/// The type of the text format.
const CONTENT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Answers clients until a signal ends it. With `any_host` a request may name any host.
///
/// # Errors
/// The system's error if the address cannot be listened on.
pub(super) fn serve(
    address: &ListenAddress,
    any_host: bool,
    text: impl Fn() -> Result<String, StatusError> + Sync,
) -> io::Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register(signal, stop.clone())?;
    }
    let listener = Listener::bind(address)?;
    // A failure to write to stderr cannot be reported.
    let _ =
        writeln!(io::stderr().lock(), "aquifer: metrics at {}", printable(&listener.address()?));
    let reading = SharedReading { text, last: Mutex::new(None) };
    thread::scope(|threads| {
        let (mut clients, mut leaving) = (VecDeque::new(), Vec::new());
        let outcome = loop {
            if stop.load(Ordering::Relaxed) {
                break Ok(());
            }
            let mut polled = [PollFd::new(listener.fd(), PollFlags::POLLIN)];
            let ready = match poll(&mut polled, PollTimeout::from(PAUSE_MS)) {
                Ok(ready) => ready > 0,
                Err(Errno::EINTR) => false,
                Err(error) => break Err(error.into()),
            };
            clients.retain(|(_, thread): &Client<'_>| !thread.is_finished());
            leaving.retain(|thread: &ClientThread<'_>| !thread.is_finished());
            if !ready {
                continue;
            }
            if leaving.len() >= MOST_CLIENTS {
                // They wait for the reading that is under way.
                thread::sleep(Duration::from_millis(10));
                continue;
            }
            if clients.len() == MOST_CLIENTS {
                end_first(&mut clients, &mut leaving);
            }
            let started = listener.accept().and_then(|stream| {
                let client = Arc::new(stream);
                let own = client.clone();
                let reading = &reading;
                let thread = thread::Builder::new().spawn_scoped(threads, move || {
                    // A client that breaks off, or is too slow, has no answer.
                    let _ = attend(&own, any_host, || reading.answer());
                    let _ = own.shutdown(Shutdown::Both);
                })?;
                Ok((client, thread))
            });
            match started {
                Ok(client) => clients.push_back(client),
                // The client has gone before it was accepted.
                Err(error) if is_of_client(&error) => {}
                // No file or thread is left, for one: a place is freed, and the loop does not spin.
                Err(_) => {
                    end_first(&mut clients, &mut leaving);
                    thread::sleep(Duration::from_millis(10));
                }
            }
        };
        while !clients.is_empty() {
            end_first(&mut clients, &mut leaving);
        }
        outcome
    })
}

fn is_of_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    matches!(error.kind(), ConnectionAborted | Interrupted | WouldBlock)
}

/// The thread of a client.
type ClientThread<'scope> = thread::ScopedJoinHandle<'scope, ()>;
/// A client and its thread.
type Client<'scope> = (Arc<TcpStream>, ClientThread<'scope>);

/// Ends the connection of the client that came first. Its thread then ends too.
fn end_first<'scope>(
    clients: &mut VecDeque<Client<'scope>>,
    leaving: &mut Vec<ClientThread<'scope>>,
) {
    if let Some((client, thread)) = clients.pop_front() {
        // One that has closed already is what is wanted.
        let _ = client.shutdown(Shutdown::Both);
        leaving.push(thread);
    }
}

/// The text of one reading, for all clients that asked before it began.
struct SharedReading<F> {
    text: F,
    /// When the last reading began, and its text, or none if it failed.
    last: Mutex<Option<(Instant, Option<Arc<str>>)>>,
}

impl<F: Fn() -> Result<String, StatusError>> SharedReading<F> {
    fn answer(&self) -> Option<Arc<str>> {
        let asked = Instant::now();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some((begun, text)) if *begun >= asked => text.clone(),
            _ => {
                let begun = Instant::now();
                let text = (self.text)().ok().map(Arc::from);
                *last = Some((begun, text.clone()));
                text
            }
        }
    }
}

/// Reads a request, answers it, and waits until the client has closed.
fn attend(
    mut client: &TcpStream,
    any_host: bool,
    text: impl FnOnce() -> Option<Arc<str>>,
) -> io::Result<()> {
    let deadline = Instant::now() + REQUEST_TIME;
    let (mut head, mut piece) = (Vec::new(), [0; 2048]);
    let answer = loop {
        let room = (MOST_BYTES - head.len()).min(piece.len());
        let read = read_before(client, &mut piece[..room], deadline)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        head.extend_from_slice(&piece[..read]);
        if let Some(answer) = request::answer(&head, any_host) {
            break answer;
        }
    };
    let response = match answer {
        Answer::Refusal(status) => refusal(status),
        Answer::Metrics { with_body } => match text() {
            Some(text) => respond("200 OK", "", CONTENT, &text, with_body),
            // The reason names paths of this user; the client gets none.
            None => refusal("500 Internal Server Error"),
        },
    };
    let deadline = Instant::now() + ANSWER_TIME;
    let mut rest = response.as_bytes();
    debug_assert!(response.ends_with("\n"), "an answer is whole");
    while !rest.is_empty() {
        client.set_write_timeout(Some(left_until(deadline)?))?;
        match client.write(rest)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => rest = &rest[written..],
        }
    }
    client.shutdown(Shutdown::Write)?;
    let deadline = Instant::now() + DRAIN_TIME;
    while read_before(client, &mut piece, deadline)? > 0 {}
    Ok(())
}

fn read_before(mut client: &TcpStream, into: &mut [u8], deadline: Instant) -> io::Result<usize> {
    client.set_read_timeout(Some(left_until(deadline)?))?;
    client.read(into)
}

fn left_until(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Returns an answer with its status as the body.
fn refusal(status: &str) -> String {
    let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
    respond(status, allow, "text/plain; charset=utf-8", &format!("{status}\n"), true)
}

/// Returns a whole answer. The connection ends with it.
fn respond(status: &str, fields: &str, content: &str, body: &str, with_body: bool) -> String {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content}\r\nContent-Length: {}\r\n\
         {fields}Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n\
         Connection: close\r\n\r\n{}",
        body.len(),
        if with_body { body } else { "" }
    )
}

/// The socket that clients connect to. One in the file system is removed at the end.
#[derive(Debug)]
enum Listener {
    Tcp(TcpListener),
    Unix { listener: UnixListener, path: PathBuf, file: (u64, u64) },
}

impl Listener {
    /// Listens. Of a socket in the file system, only this user can connect to it. One that no
    /// process listens on is replaced.
    fn bind(address: &ListenAddress) -> io::Result<Self> {
        match address {
            ListenAddress::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(Self::Tcp(listener))
            }
            ListenAddress::Unix(path) => {
                remove_stale(path)?;
                let listener = bind_private(path)?;
                listener.set_nonblocking(true)?;
                let found = fs::symlink_metadata(path)?;
                let file = (found.dev(), found.ino());
                Ok(Self::Unix { listener, path: path.clone(), file })
            }
        }
    }

    /// Accepts a client that waits. Any connected socket has the calls of a `TcpStream` that are
    /// used here.
    fn accept(&self) -> io::Result<TcpStream> {
        match self {
            Self::Tcp(listener) => listener.accept().map(|(stream, _)| stream),
            Self::Unix { listener, .. } => {
                listener.accept().map(|(stream, _)| OwnedFd::from(stream).into())
            }
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix { listener, .. } => listener.as_fd(),
        }
    }

    /// Returns what a client is told to connect to: with port 0, the system has chosen one.
    fn address(&self) -> io::Result<String> {
        match self {
            Self::Tcp(listener) => Ok(format!("http://{}/metrics", listener.local_addr()?)),
            Self::Unix { path, .. } => Ok(format!("unix:{}", path.display())),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix { path, file, .. } = self {
            // Another process may have put its own there meanwhile.
            let found = fs::symlink_metadata(&path).map(|found| (found.dev(), found.ino()));
            if found.is_ok_and(|found| found == *file) {
                // What is left is replaced by the next one that listens there.
                let _ = fs::remove_file(path);
            }
        }
    }
}

/// Binds a socket of mode 0600. The mode cannot be changed afterwards without a moment in which
/// others may connect, and the mask is the process's: it has one thread yet.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let before = umask(Mode::S_IXUSR | Mode::S_IRWXG | Mode::S_IRWXO);
    let bound = UnixListener::bind(path);
    umask(before);
    bound
}

/// Removes a socket that no process listens on.
fn remove_stale(path: &Path) -> io::Result<()> {
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    if !found.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it exists and is no socket"));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there")),
    }
}
