//! The socket that clients connect to. A socket in the file system is removed at the end.

use super::connection::ClientStream;
use crate::listen_address::ListenAddress;
use nix::sys::stat::{Mode, umask};
use std::{
    fs, io,
    net::TcpListener,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

/// A socket that clients connect to. Never blocks.
#[derive(Debug)]
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix { listener: UnixListener, path: PathBuf, file: (u64, u64) },
}

impl Listener {
    /// Listens. Of a socket in the file system, only this user can connect to it. One that no
    /// process listens on is replaced.
    pub(super) fn bind(address: &ListenAddress) -> io::Result<Self> {
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

    /// Accepts a client that waits.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if there is none.
    pub(super) fn accept(&self) -> io::Result<ClientStream> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Ok(ClientStream::Tcp(stream))
            }
            Self::Unix { listener, .. } => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Ok(ClientStream::Unix(stream))
            }
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix { listener, .. } => listener.as_fd(),
        }
    }

    /// Returns what a client is told to connect to: with port 0, the system has chosen one.
    pub(super) fn address(&self) -> io::Result<String> {
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
