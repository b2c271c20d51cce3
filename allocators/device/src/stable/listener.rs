//! Sockets of servers: bound at a path or in the abstract namespace, and connected to in time.

use super::{error::ShareError, forks::Unforked};
use nix::{
    fcntl::{OFlag, open},
    sys::{
        socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect as connect_socket, socket},
        stat::Mode,
    },
    unistd::geteuid,
};
use std::{
    ffi::CString,
    fs::{self, File, TryLockError},
    io,
    os::{
        fd::AsRawFd,
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            fs::{FileTypeExt, MetadataExt},
            net::{SocketAddr, UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// How long a server waits for others that bind at its path, and for one that may be dead.
const BIND_WAIT: Duration = Duration::from_secs(1);

/// The file of a bound socket.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// The device and the number of its inode.
    identity: (u64, u64),
}

impl SocketFile {
    /// Removes the file, unless another one has replaced it.
    pub(super) fn remove(&self) {
        let found = fs::symlink_metadata(&self.path).map(|found| (found.dev(), found.ino()));
        if found.is_ok_and(|found| found == self.identity) {
            // If the system refuses, the next server at the path removes it.
            let _removed = fs::remove_file(&self.path);
        }
    }
}

/// Binds a socket, which accepts without waiting. A file that a dead server has left is replaced:
/// processes of this user that bind at the same path do so one after the other.
pub(super) fn listen(
    address: &SocketAddr,
) -> Result<(Unforked<UnixListener>, Option<SocketFile>), ShareError> {
    let bind = || {
        Unforked::open(|| {
            let listener = UnixListener::bind_addr(address)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        })
    };
    let Some(path) = address.as_pathname() else { return Ok((bind()?, None)) };
    let _locked = BindLock::take(path)?;
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::Error::from(io::ErrorKind::AlreadyExists).into());
        }
        Ok(_) => match connect(address, Instant::now() + BIND_WAIT) {
            Ok(_) | Err(ShareError::TimedOut) => {
                return Err(io::Error::from(io::ErrorKind::AddrInUse).into());
            }
            Err(ShareError::NoServer(_)) => fs::remove_file(path)?,
            Err(error) => return Err(error),
        },
    }
    let listener = bind()?;
    let found = fs::symlink_metadata(path)?;
    let file = SocketFile { path: path.to_owned(), identity: (found.dev(), found.ino()) };
    Ok((listener, Some(file)))
}

/// The right of one process of this user to bind at a path: a lock on a file beside it, which
/// exists while it is held. Only this user can open the file, so no other one can lock it, as any
/// reader of a folder can lock the folder.
struct BindLock {
    path: PathBuf,
    _file: Unforked<File>,
}

impl BindLock {
    /// Returns `None` where the name is taken by what is not a file of this user alone. Another
    /// user can put that there, and must not keep a server from binding: without the lock, two
    /// servers of this user that start at one moment may replace each other.
    fn take(socket: &Path) -> Result<Option<Self>, ShareError> {
        let mut name = socket.as_os_str().to_owned();
        name.push(".lock");
        let raw = CString::new(name.as_bytes()).map_err(io::Error::from)?;
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let flags = flags | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let (path, deadline) = (PathBuf::from(name), Instant::now() + BIND_WAIT);
        loop {
            let open = || Ok(File::from(open(&*raw, flags, Mode::S_IRUSR | Mode::S_IWUSR)?));
            // A folder that cannot be written to refuses the socket too.
            let Ok(file) = Unforked::open(open) else { return Ok(None) };
            let Some(opened) = file.get() else { return Ok(None) };
            let found = opened.metadata()?;
            let is_private = found.uid() == geteuid().as_raw() && found.mode() & 0o077 == 0;
            if !found.is_file() || !is_private {
                return Ok(None);
            }
            match opened.try_lock() {
                Ok(()) => {
                    // The last holder may have removed it meanwhile.
                    let named = fs::symlink_metadata(&path).map(|named| (named.dev(), named.ino()));
                    if named.is_ok_and(|named| named == (found.dev(), found.ino())) {
                        return Ok(Some(Self { path, _file: file }));
                    }
                }
                Err(TryLockError::Error(error)) => return Err(error.into()),
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(1)),
            }
            if Instant::now() >= deadline {
                return Err(ShareError::TimedOut);
            }
        }
    }
}

impl Drop for BindLock {
    fn drop(&mut self) {
        // Under the lock. A file that is left is locked by the next process.
        let _removed = fs::remove_file(&self.path);
    }
}

/// Connects by the deadline. The system makes an opener wait while too many others do.
pub(super) fn connect(address: &SocketAddr, deadline: Instant) -> Result<UnixStream, ShareError> {
    let to = match (address.as_pathname(), address.as_abstract_name()) {
        (Some(path), _) => UnixAddr::new(path),
        (None, Some(name)) => UnixAddr::new_abstract(name),
        (None, None) => Err(nix::Error::EINVAL),
    };
    let to = to.map_err(io::Error::from)?;
    let (family, kind) = (AddressFamily::Unix, SockType::Stream);
    let socket = socket(family, kind, SockFlag::SOCK_CLOEXEC, None).map_err(io::Error::from)?;
    let socket = UnixStream::from(socket);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ShareError::TimedOut);
        }
        socket.set_write_timeout(Some(left))?;
        match connect_socket(socket.as_raw_fd(), &to) {
            Ok(()) => return Ok(socket),
            Err(nix::Error::EINTR) => {}
            Err(error @ (nix::Error::ECONNREFUSED | nix::Error::ENOENT)) => {
                return Err(ShareError::NoServer(error.into()));
            }
            Err(error) => return Err(io::Error::from(error).into()),
        }
    }
}
