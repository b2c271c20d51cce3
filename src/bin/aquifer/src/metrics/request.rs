//! Parsing of HTTP requests: as much of HTTP/1.1 as a scrape needs.

use std::net::IpAddr;

/// Most bytes of a request's head.
pub(super) const MOST_BYTES: usize = 8 << 10;

/// The answer to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    /// The metrics, or their head only.
    Metrics { with_body: bool },
    /// An error of the client's.
    Refusal(&'static str),
}

pub(super) const BAD_REQUEST: Answer = Answer::Refusal("400 Bad Request");
pub(super) const TOO_LARGE: Answer = Answer::Refusal("431 Request Header Fields Too Large");
const FORBIDDEN: Answer = Answer::Refusal("403 Forbidden");
const NOT_FOUND: Answer = Answer::Refusal("404 Not Found");
const NOT_ALLOWED: Answer = Answer::Refusal("405 Method Not Allowed");
const OTHER_VERSION: Answer = Answer::Refusal("505 HTTP Version Not Supported");

/// Returns the answer to the request that these bytes begin with, or `None` if its head is not
/// complete.
///
/// With `any_host` the request may name any host. Otherwise it must name this machine by a number
/// or as `localhost`: a web page whose name an attacker resolves to 127.0.0.1 could otherwise read
/// the figures.
pub(super) fn answer(bytes: &[u8], any_host: bool) -> Option<Answer> {
    let Some(end) = end_of_head(bytes) else {
        let is_hopeless = bytes.first().is_some_and(|byte| !byte.is_ascii_uppercase());
        return match bytes.len() {
            _ if is_hopeless => Some(BAD_REQUEST),
            MOST_BYTES.. => Some(TOO_LARGE),
            _ => None,
        };
    };
    let Ok(head) = std::str::from_utf8(&bytes[..end]) else { return Some(BAD_REQUEST) };
    let mut lines = head.lines();
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Some(BAD_REQUEST);
    };
    if !matches!(version, "HTTP/1.1" | "HTTP/1.0") {
        let is_http = version.starts_with("HTTP/");
        return Some(if is_http { OTHER_VERSION } else { BAD_REQUEST });
    }
    let mut hosts = Vec::new();
    for line in lines.filter(|line| !line.is_empty()) {
        let Some((name, value)) = line.split_once(':') else { return Some(BAD_REQUEST) };
        if name.eq_ignore_ascii_case("host") {
            hosts.push(value.trim());
        }
    }
    let path = target.split('?').next().unwrap_or_default();
    Some(match (method, path) {
        _ if hosts.len() > 1 => BAD_REQUEST,
        _ if !any_host && !hosts.iter().all(|host| is_own_name(host)) => FORBIDDEN,
        ("GET", "/metrics") => Answer::Metrics { with_body: true },
        ("HEAD", "/metrics") => Answer::Metrics { with_body: false },
        ("GET" | "HEAD", _) => NOT_FOUND,
        _ => NOT_ALLOWED,
    })
}

fn end_of_head(bytes: &[u8]) -> Option<usize> {
    let bytes = &bytes[..bytes.len().min(MOST_BYTES)];
    let crlf = bytes.windows(4).position(|four| four == b"\r\n\r\n").map(|at| at + 4);
    let lf = bytes.windows(2).position(|two| two == b"\n\n").map(|at| at + 2);
    crlf.into_iter().chain(lf).min()
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

    fn of(text: &str) -> Option<Answer> {
        answer(text.as_bytes(), false)
    }

    #[test]
    fn scrapes_are_answered_and_everything_else_is_refused() {
        let metrics = Some(Answer::Metrics { with_body: true });
        assert_eq!(of("GET /metrics HTTP/1.1\r\nHost: localhost:9464\r\n\r\n"), metrics);
        assert_eq!(of("GET /metrics?a=b HTTP/1.0\r\n\r\n"), metrics);
        assert_eq!(of("GET /metrics HTTP/1.1\nhost: [::1]:1\n\nrest"), metrics);
        let head = of("HEAD /metrics HTTP/1.1\r\nHost: 10.1.2.3\r\n\r\n");
        assert_eq!(head, Some(Answer::Metrics { with_body: false }));
        for (text, refusal) in [
            ("GET / HTTP/1.1\r\n\r\n", NOT_FOUND),
            ("GET /metrics/../x HTTP/1.1\r\n\r\n", NOT_FOUND),
            ("POST /metrics HTTP/1.1\r\n\r\n", NOT_ALLOWED),
            ("GET /metrics HTTP/2.0\r\n\r\n", OTHER_VERSION),
            ("GET /metrics SMTP\r\n\r\n", BAD_REQUEST),
            ("GET  /metrics HTTP/1.1\r\n\r\n", BAD_REQUEST),
            ("GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", BAD_REQUEST),
            ("GET /metrics HTTP/1.1\r\nHost: a.b\r\n\r\n", FORBIDDEN),
            ("GET /metrics HTTP/1.1\r\nHost: 1.1.1.1\r\nHost: a.b\r\n\r\n", BAD_REQUEST),
            ("\u{16}\u{3}\u{1}", BAD_REQUEST),
        ] {
            assert_eq!(of(text), Some(refusal), "{text:?}");
        }
        assert_eq!(answer(b"GET /metrics HTTP/1.1\r\nHost: a.b\r\n\r\n", true), metrics);
        assert_eq!(answer(b"GET /\xff HTTP/1.1\r\n\r\n", true), Some(BAD_REQUEST));
    }

    #[test]
    fn a_head_is_read_to_its_end_and_no_further_than_its_bound() {
        let whole = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
        for cut in 0..whole.len() {
            assert_eq!(of(&whole[..cut]), None, "{cut}");
        }
        let huge = format!("GET /metrics HTTP/1.1\r\nA: {}", "a".repeat(MOST_BYTES));
        assert_eq!(of(&huge), Some(TOO_LARGE));
        assert_eq!(of(&format!("{huge}\r\n\r\n")), Some(TOO_LARGE));
    }
}
