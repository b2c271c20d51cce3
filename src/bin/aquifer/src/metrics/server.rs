//! The server: answers `GET /metrics`, with a thread for each client, until a signal ends the
//! program.
//!
//! - A client has to send its request within 5 s, and each write of the answer may take 15 s.
//! - One reading of all processes serves all clients that asked before it began.

use aquifer_status::StatusError;
use std::{
    io::{self, Read, Write},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Most clients at one time. Others are turned away.
const MOST_CLIENTS: usize = 256;
/// Most bytes of a request.
const MOST_BYTES: usize = 8 << 10;
/// How long a client may take to send its request.
const REQUEST_TIME: Duration = Duration::from_secs(5);
/// How long a write of the answer may take.
const ANSWER_TIME: Duration = Duration::from_secs(15);
/// The type of the text format.
const CONTENT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Answers clients. With `any_host` a request may name any host.
///
/// # Errors
/// The system's error if the address cannot be listened on.
pub(super) fn serve(
    address: SocketAddr,
    any_host: bool,
    text: impl Fn() -> Result<String, StatusError> + Sync,
) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    let address = listener.local_addr()?;
    // A failure to write to stderr cannot be reported.
    let _ = writeln!(io::stderr().lock(), "aquifer: metrics at http://{address}/metrics");
    let reading = SharedReading { text, last: Mutex::new(None) };
    let clients = AtomicUsize::new(0);
    thread::scope(|threads| {
        for client in listener.incoming() {
            let Ok(client) = client else {
                // No file is left, for one: the loop does not spin.
                thread::sleep(Duration::from_millis(10));
                continue;
            };
            if clients.load(Ordering::Relaxed) >= MOST_CLIENTS {
                continue;
            }
            clients.fetch_add(1, Ordering::Relaxed);
            let attended = thread::Builder::new().spawn_scoped(threads, || {
                // A client that breaks off, or is too slow, has no answer.
                let _ = attend(client, any_host, || reading.answer());
                clients.fetch_sub(1, Ordering::Relaxed);
            });
            if attended.is_err() {
                clients.fetch_sub(1, Ordering::Relaxed);
            }
        }
    });
    Ok(())
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

/// Reads a request and answers it.
fn attend(
    mut client: TcpStream,
    any_host: bool,
    text: impl FnOnce() -> Option<Arc<str>>,
) -> io::Result<()> {
    client.set_write_timeout(Some(ANSWER_TIME))?;
    let deadline = Instant::now() + REQUEST_TIME;
    let (mut request, mut piece) = (Vec::new(), [0; 2048]);
    let is_whole = |request: &[u8]| request.windows(4).any(|end| end == b"\r\n\r\n");
    while !is_whole(&request) && request.len() < MOST_BYTES {
        let left = deadline.saturating_duration_since(Instant::now());
        // No time is left if it is zero, which the system refuses.
        client.set_read_timeout(Some(left))?;
        match client.read(&mut piece)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => request.extend_from_slice(&piece[..read]),
        }
    }
    let asked = check(&String::from_utf8_lossy(&request), any_host);
    let (status, content, body, with_body) = match asked.map(|body| (text(), body)) {
        Ok((Some(text), with_body)) => ("200 OK", CONTENT, text, with_body),
        // The reason names paths of this user; the client gets none.
        Ok((None, _)) => ("500 Internal Server Error", "text/plain", "unreadable\n".into(), true),
        Err(status) => (status, "text/plain", format!("{status}\n").into(), true),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content}\r\nContent-Length: {}\r\n\
         Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n",
        body.len(),
    );
    client.write_all(head.as_bytes())?;
    client.write_all(if with_body { body.as_bytes() } else { b"" })?;
    client.shutdown(Shutdown::Both)
}

/// Returns whether the answer has the metrics, or their head alone, or why the request is refused.
///
/// Unless any host may be named, it must be this machine by a number or as `localhost`: a web page
/// whose name an attacker resolves to 127.0.0.1 could otherwise read the figures.
fn check(request: &str, any_host: bool) -> Result<bool, &'static str> {
    let mut lines = request.lines();
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some("HTTP/1.1" | "HTTP/1.0"), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err("400 Bad Request");
    };
    let fields = lines.filter_map(|line| line.split_once(':'));
    let mut hosts = fields.filter(|(name, _)| name.eq_ignore_ascii_case("host"));
    if !any_host && !hosts.all(|(_, host)| is_own_name(host.trim())) {
        return Err("403 Forbidden");
    }
    match (method, target.split('?').next()) {
        ("GET", Some("/metrics")) => Ok(true),
        ("HEAD", Some("/metrics")) => Ok(false),
        ("GET" | "HEAD", _) => Err("404 Not Found"),
        _ => Err("405 Method Not Allowed"),
    }
}

/// Returns whether a host is a number or `localhost`, with any port.
fn is_own_name(host: &str) -> bool {
    let bracketed = host.strip_prefix('[').and_then(|host| host.split_once(']'));
    let name = bracketed.map_or_else(|| host.split(':').next().unwrap_or_default(), |(ip, _)| ip);
    name.is_empty() || name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrapes_are_answered_and_everything_else_is_refused() {
        for (request, expected) in [
            ("GET /metrics HTTP/1.1\r\nHost: localhost:9464\r\n\r\n", Ok(true)),
            ("GET /metrics?a=b HTTP/1.0\r\n\r\n", Ok(true)),
            ("GET /metrics HTTP/1.1\r\nhost: [::1]:1\r\n\r\nrest", Ok(true)),
            ("HEAD /metrics HTTP/1.1\r\nHost: 10.1.2.3\r\n\r\n", Ok(false)),
            ("GET / HTTP/1.1\r\n\r\n", Err("404 Not Found")),
            ("GET /metrics/../x HTTP/1.1\r\n\r\n", Err("404 Not Found")),
            ("POST /metrics HTTP/1.1\r\n\r\n", Err("405 Method Not Allowed")),
            ("GET /metrics HTTP/2.0\r\n\r\n", Err("400 Bad Request")),
            ("GET  /metrics HTTP/1.1\r\n\r\n", Err("400 Bad Request")),
            ("GET /metrics HTTP/1.1\r\nHost: a.b\r\n\r\n", Err("403 Forbidden")),
            ("GET /metrics HTTP/1.1\r\nHost: ::1\r\nHost: a.b\r\n\r\n", Err("403 Forbidden")),
            ("\u{16}\u{3}\u{1}", Err("400 Bad Request")),
        ] {
            assert_eq!(check(request, false), expected, "{request:?}");
        }
        assert_eq!(check("GET /metrics HTTP/1.1\r\nHost: a.b\r\n\r\n", true), Ok(true));
    }
}
