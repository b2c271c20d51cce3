//! One client of the server, within bounds of time and size.
//!
//! ```text
//!   Reading ──head complete, or refused──▶ Writing ──all written──▶ Draining ──client closes──▶ Over
//!      └───────────── any error, or its deadline ──────┴─────────────────┴──────────────────▶ Over
//! ```

use super::request::{self, Answer, MOST_BYTES};
use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
    time::{Duration, Instant},
};

/// How long a client may take to send its request.
const REQUEST_TIME: Duration = Duration::from_secs(5);
/// How long a client may take to receive the answer.
const ANSWER_TIME: Duration = Duration::from_secs(15);
/// How long the server waits for the client to close. Without that, bytes which the client still
/// sends could reset the connection before it has read the answer.
const DRAIN_TIME: Duration = Duration::from_secs(1);
/// The most that one client can make the server do before the others have their turn.
const TURN_BYTES: usize = 64 << 10;

/// The stream to a client. Never blocks.
#[derive(Debug)]
pub(super) enum ClientStream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl ClientStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(bytes),
            Self::Unix(stream) => stream.read(bytes),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
        }
    }

    fn end_answer(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Self::Unix(stream) => stream.shutdown(Shutdown::Write),
        }
    }
}

#[derive(Debug)]
enum Phase {
    Reading(Vec<u8>),
    Writing { answer: Arc<[u8]>, written: usize },
    Draining,
    Over,
}

/// One client.
#[derive(Debug)]
pub(super) struct Connection {
    stream: ClientStream,
    phase: Phase,
    deadline: Instant,
}

impl Connection {
    pub(super) fn new(stream: ClientStream) -> Self {
        let deadline = Instant::now() + REQUEST_TIME;
        Self { stream, phase: Phase::Reading(Vec::new()), deadline }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match &self.stream {
            ClientStream::Tcp(stream) => stream.as_fd(),
            ClientStream::Unix(stream) => stream.as_fd(),
        }
    }

    /// Returns whether the connection waits until it can write. Otherwise it waits to read.
    pub(super) fn is_writing(&self) -> bool {
        matches!(self.phase, Phase::Writing { .. })
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        matches!(self.phase, Phase::Over) || now >= self.deadline
    }

    /// Does what is possible without waiting. `metrics` returns the whole answer to a scrape.
    pub(super) fn advance(&mut self, any_host: bool, metrics: impl FnOnce(bool) -> Arc<[u8]>) {
        let outcome = match self.phase {
            Phase::Reading(_) => self.read_request(any_host, metrics),
            Phase::Writing { .. } => self.write_answer(),
            Phase::Draining => self.drain(),
            Phase::Over => Ok(()),
        };
        match outcome {
            Ok(()) => {}
            Err(error) if is_temporary(&error) => {}
            Err(_) => self.phase = Phase::Over,
        }
    }

    fn read_request(
        &mut self,
        any_host: bool,
        metrics: impl FnOnce(bool) -> Arc<[u8]>,
    ) -> io::Result<()> {
        let Phase::Reading(bytes) = &mut self.phase else { return Ok(()) };
        let mut piece = [0; 2048];
        let answer = loop {
            let room = (MOST_BYTES - bytes.len()).min(piece.len());
            let read = self.stream.read(&mut piece[..room])?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            bytes.extend_from_slice(&piece[..read]);
            if let Some(answer) = request::answer(bytes, any_host) {
                break answer;
            }
        };
        let answer = match answer {
            Answer::Metrics { with_body } => metrics(with_body),
            Answer::Refusal(status) => refusal(status),
        };
        self.phase = Phase::Writing { answer, written: 0 };
        self.deadline = Instant::now() + ANSWER_TIME;
        self.write_answer()
    }

    fn write_answer(&mut self) -> io::Result<()> {
        let Phase::Writing { answer, written } = &mut self.phase else { return Ok(()) };
        let turn = answer.len().min(*written + TURN_BYTES);
        while *written < turn {
            match self.stream.write(&answer[*written..turn])? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                more => *written += more,
            }
        }
        if *written == answer.len() {
            self.stream.end_answer()?;
            self.phase = Phase::Draining;
            self.deadline = Instant::now() + DRAIN_TIME;
        }
        Ok(())
    }

    fn drain(&mut self) -> io::Result<()> {
        let mut piece = [0; 4096];
        for _ in 0..TURN_BYTES / piece.len() {
            if self.stream.read(&mut piece)? == 0 {
                self.phase = Phase::Over;
                return Ok(());
            }
        }
        Ok(())
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Returns an answer with its status as the body.
pub(super) fn refusal(status: &str) -> Arc<[u8]> {
    let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
    respond(status, allow, "text/plain; charset=utf-8", &format!("{status}\n"), true)
}

/// Returns a whole answer. The connection ends with it.
pub(super) fn respond(
    status: &str,
    fields: &str,
    content: &str,
    body: &str,
    with_body: bool,
) -> Arc<[u8]> {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content}\r\nContent-Length: {}\r\n\
         {fields}Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    let mut answer = head.into_bytes();
    if with_body {
        answer.extend_from_slice(body.as_bytes());
    }
    answer.into()
}
