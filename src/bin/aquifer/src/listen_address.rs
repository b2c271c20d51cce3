//! Where to listen: an address of this machine's own, or a socket in the file system.

use aquifer_benches::console::foreign;
use std::{
    error, fmt,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};

/// Where to listen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ListenAddress {
    /// A TCP port.
    Tcp(SocketAddr),
    /// The path of a socket.
    Unix(PathBuf),
}

/// Why an address is refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum AddressError {
    /// It is none.
    NotAnAddress,
    /// Other machines can reach it.
    NotLoopback(SocketAddr),
}

impl fmt::Display for AddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAnAddress => {
                f.write_str("an address is IP:PORT, localhost:PORT, or unix:PATH")
            }
            Self::NotLoopback(address) => write!(
                f,
                "other machines can reach {address}, and nothing is asked of them; listen on \
                 127.0.0.1, or accept that by --expose-to-network"
            ),
        }
    }
}

impl error::Error for AddressError {}

impl FromStr for ListenAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Self::Unix(path.into()));
        }
        if let Some(port) = text.strip_prefix("localhost:") {
            let port = port.parse().map_err(|_| AddressError::NotAnAddress)?;
            return Ok(Self::Tcp((Ipv4Addr::LOCALHOST, port).into()));
        }
        text.parse().map(Self::Tcp).map_err(|_| AddressError::NotAnAddress)
    }
}

impl ListenAddress {
    /// Refuses an address that other machines can reach, unless that is accepted.
    pub(crate) fn check(&self, exposed: bool) -> Result<(), AddressError> {
        match self {
            Self::Tcp(address) if !address.ip().is_loopback() && !exposed => {
                Err(AddressError::NotLoopback(*address))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", foreign::path(path)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_and_sockets_are_listened_on_unless_the_risk_is_accepted() {
        for own in ["127.0.0.1:9464", "127.8.9.1:0", "[::1]:1", "localhost:9464", "unix:a/b"] {
            let address: ListenAddress = own.parse().unwrap();
            assert_eq!(address.check(false), Ok(()), "{own}");
        }
        for open in ["0.0.0.0:1", "[::]:1", "10.0.0.1:80", "[::ffff:127.0.0.1]:1", "8.8.8.8:1"] {
            let address: ListenAddress = open.parse().unwrap();
            let refused = address.check(false).unwrap_err();
            assert!(refused.to_string().contains("--expose-to-network"), "{open}");
            assert_eq!(address.check(true), Ok(()), "{open}");
        }
        for none in ["", "9464", ":9464", "localhost", "example.org:80", "unix:", "1.2.3.4:70000"] {
            assert_eq!(none.parse::<ListenAddress>(), Err(AddressError::NotAnAddress), "{none}");
        }
    }
}
