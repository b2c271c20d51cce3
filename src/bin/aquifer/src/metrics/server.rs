//! The loop over all clients, on one thread.
//!
//! - No call waits for a client: sockets never block, and the loop sleeps in `poll` alone.
//! - One reading of all processes serves all clients that ask at the same time.
//! - Each client has a deadline and a bound on its request. When all places are taken, the client
//!   that came first has to go, so that slow clients cannot keep others out.
//! - It ends by SIGINT, SIGTERM or SIGHUP.

use super::{
    connection::{ClientStream, Connection, refusal, respond},
    listener::Listener,
};
use crate::listen_address::ListenAddress;
use aquifer_console::foreign::printable;
use aquifer_status::StatusError;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
};
use std::{
    cell::OnceCell,
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Most clients at one time.
const MOST_CLIENTS: usize = 64;
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
    text: impl Fn() -> Result<String, StatusError>,
) -> io::Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register(signal, stop.clone())?;
    }
    let listener = Listener::bind(address)?;
    let shown = listener.address()?;
    // A failure to write to stderr cannot be reported.
    let _ = writeln!(io::stderr().lock(), "aquifer: metrics at {}", printable(&shown));
    let mut clients: Vec<Connection> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let ready = wait(&listener, &clients)?;
        // One reading for all clients that are ready, however many they are.
        let reading = OnceCell::new();
        let scrape = |with_body: bool| match reading.get_or_init(|| text().ok()) {
            Some(text) => respond("200 OK", "", CONTENT, text, with_body),
            // The reason names paths of this user; the client gets none.
            None => refusal("500 Internal Server Error"),
        };
        // The first is the listener.
        for (client, ready) in clients.iter_mut().zip(ready.iter().skip(1)) {
            if *ready {
                client.advance(any_host, scrape);
            }
        }
        if ready.first() == Some(&true) {
            accept(&listener, &mut clients);
        }
        let now = Instant::now();
        clients.retain(|client| !client.is_over(now));
    }
    Ok(())
}

/// Waits until a socket is ready. Returns which are: the listener, then each client.
fn wait(listener: &Listener, clients: &[Connection]) -> io::Result<Vec<bool>> {
    let mut polled = vec![PollFd::new(listener.fd(), PollFlags::POLLIN)];
    polled.extend(clients.iter().map(|client| {
        let events = if client.is_writing() { PollFlags::POLLOUT } else { PollFlags::POLLIN };
        PollFd::new(client.fd(), events)
    }));
    match poll(&mut polled, PollTimeout::from(PAUSE_MS)) {
        Ok(_) => {}
        Err(Errno::EINTR) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    }
    // An error or a hang-up is found by the next read or write.
    Ok(polled.iter().map(|fd| fd.any().unwrap_or(true)).collect())
}

/// Accepts the clients that wait, as many as there are places.
fn accept(listener: &Listener, clients: &mut Vec<Connection>) {
    for _ in 0..MOST_CLIENTS {
        let stream: ClientStream = match listener.accept() {
            Ok(stream) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
            Err(_) => {
                // No file is left, for one: a place is freed, and the loop does not spin.
                if !clients.is_empty() {
                    clients.remove(0);
                }
                thread::sleep(Duration::from_millis(10));
                return;
            }
        };
        if clients.len() == MOST_CLIENTS {
            clients.remove(0);
        }
        clients.push(Connection::new(stream));
    }
}
