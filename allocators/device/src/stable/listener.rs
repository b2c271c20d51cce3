//! Sockets of servers: bound at a path or in the abstract namespace, and connected to in time.

use super::error::ShareError;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect as connect_socket, socket,
};
use std::{
    fs::{self, File, TryLockError},
    io,
    os::{
        fd::AsRawFd,
        linux::net::SocketAddrExt,
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::{SocketAddr, UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// How long a server waits for others that bind in its folder, and for one that may be dead.
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

/// Binds a socket. A file that a dead server has left is replaced: processes that bind in the same
/// folder do so one after the other, by a lock on the folder that ends with its process.
pub(super) fn listen(
    address: &SocketAddr,
) -> Result<(UnixListener, Option<SocketFile>), ShareError> {
    let Some(path) = address.as_pathname() else {
        return Ok((UnixListener::bind_addr(address)?, None));
    };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let _locked = lock_folder(folder.unwrap_or(Path::new(".")))?;
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
    let listener = UnixListener::bind_addr(address)?;
    let found = fs::symlink_metadata(path)?;
    let file = SocketFile { path: path.to_owned(), identity: (found.dev(), found.ino()) };
    Ok((listener, Some(file)))
}

fn lock_folder(folder: &Path) -> Result<File, ShareError> {
    let (folder, deadline) = (File::open(folder)?, Instant::now() + BIND_WAIT);
    loop {
        match folder.try_lock() {
            Ok(()) => return Ok(folder),
            Err(TryLockError::Error(error)) => return Err(error.into()),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                return Err(ShareError::TimedOut);
            }
            Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(1)),
        }
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
