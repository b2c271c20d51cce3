//! Clients of the server: a scrape is answered whatever others do.

use super::{
    metrics::Exposition,
    parts::{Part, Scratch, program, refused, run},
};
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpStream},
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

/// A server, and where it listens.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(folder: &Scratch, listen: &str) -> Self {
        let mut child = program(&folder.0, &["metrics", "--listen", listen])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim_end().strip_prefix("aquifer: metrics at ");
        let address = address.unwrap_or_else(|| panic!("{line}")).to_owned();
        Self { child, address }
    }

    fn connect(&self) -> TcpStream {
        let address = self.address.strip_prefix("http://").unwrap();
        let stream = TcpStream::connect(address.strip_suffix("/metrics").unwrap()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    /// Sends a request, and returns the answer.
    fn ask(&self, request: &[u8]) -> String {
        let mut stream = self.connect();
        // The server may have refused before all is sent.
        let _sent = stream.write_all(request);
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8(answer).unwrap()
    }

    fn scrape(&self) -> Exposition {
        let answer = self.ask(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
        parsed(&answer)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

fn parsed(answer: &str) -> Exposition {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("\r\nContent-Type: text/plain; version=0.0.4"), "{head}");
    assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
    Exposition::parse(body)
}

#[test]
fn a_scrape_has_the_figures_of_its_moment() {
    let folder = Scratch::new("scrape");
    let server = Server::start(&folder, "127.0.0.1:0");
    assert_eq!(server.scrape().value("aquifer_processes", &[("state", "alive")]), 0.0);
    let mut part = Part::start("device_process", &folder, 1);
    let own = part.figures();
    assert_eq!(server.scrape().value("aquifer_memory_live_bytes", &[]), own[0] as f64);
    part.go();
    let own = part.figures();
    assert_eq!(server.scrape().value("aquifer_memory_live_bytes", &[]), own[0] as f64);
}

#[test]
fn requests_for_anything_else_are_refused() {
    let folder = Scratch::new("requests");
    let server = Server::start(&folder, "[::1]:0");
    let huge = vec![b'A'; 8 << 10];
    for (request, status) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", "403"),
        (b"GET /metrics HTTP/3\r\n\r\n", "400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", "400"),
        (&huge, "400"),
    ] {
        let answer = server.ask(request);
        let cut = &request[..request.len().min(40)];
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{cut:?}: {answer}");
        assert!(answer.contains("Connection: close"), "{answer}");
    }
    let head = server.ask(b"HEAD /metrics HTTP/1.0\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.ends_with("\r\n\r\n"), "{head}");
    // A client that closes at once is no client.
    for _ in 0..100 {
        drop(server.connect());
    }
    server.scrape();
}

#[test]
fn slow_and_hostile_clients_keep_no_other_out() {
    let folder = Scratch::new("slow");
    let server = Server::start(&folder, "127.0.0.1:0");
    // Silent ones, half requests, and answers that are not read.
    let mut open = Vec::new();
    for number in 0..200 {
        let mut stream = server.connect();
        match number % 3 {
            0 => {}
            1 => stream.write_all(b"GET /metrics HTTP/1.1\r\nHo").unwrap(),
            _ => stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap(),
        }
        open.push(stream);
    }
    let dripping: Vec<_> = (0..8)
        .map(|_| {
            let mut stream = server.connect();
            thread::spawn(move || {
                // A byte at a time, far longer than the server waits.
                let start = Instant::now();
                stream.write_all(b"GET /metrics HTTP/1.1\r\nA: ").unwrap();
                while stream.write_all(b"a").is_ok() && start.elapsed() < Duration::from_secs(20) {
                    thread::sleep(Duration::from_millis(100));
                }
                start.elapsed()
            })
        })
        .collect();
    for _ in 0..20 {
        let start = Instant::now();
        server.scrape();
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    }
    for client in dripping {
        let held = client.join().unwrap();
        assert!(held < Duration::from_secs(15), "a slow client was kept for {held:?}");
    }
    // Half a request, then its end.
    let mut half = server.connect();
    half.write_all(b"GET /met").unwrap();
    half.shutdown(Shutdown::Write).unwrap();
    assert_eq!(half.read_to_end(&mut Vec::new()).unwrap(), 0);
    server.scrape();
}

#[test]
fn hostile_files_delay_no_scrape() {
    let folder = Scratch::new("hostile-files");
    // Each is whole, of a living process, and never consistent: the sequence of all its slots is
    // odd. The fields of the header are those of the layout.
    let mut part = Part::start("device_process", &folder, 1);
    let own = part.figures();
    let source = fs::read_dir(&folder.0).unwrap().next().unwrap().unwrap().path();
    let mut image = fs::read(source).unwrap();
    let word = |value: u64| value.to_ne_bytes();
    let at = image.windows(8).position(|bytes| bytes == word(u64::from(part.child.id()))).unwrap();
    let (slots, lines) = (at + 16, at + 24);
    image[slots..slots + 8].copy_from_slice(&word(256));
    image[lines..lines + 8].copy_from_slice(&word(1024));
    image[4096..].chunks_exact_mut(8).for_each(|bytes| bytes.copy_from_slice(&word(1)));
    let held: Vec<_> = (0..8)
        .map(|number| {
            let path = folder.0.join(format!("{number}.status"));
            fs::write(&path, &image).unwrap();
            let file = fs::File::open(path).unwrap();
            file.lock().unwrap();
            file
        })
        .collect();
    // One whose size is beyond all memory, and one that is no file.
    let huge = fs::File::create(folder.0.join("huge.status")).unwrap();
    huge.set_len(1 << 42).unwrap();
    nix::unistd::mkfifo(&folder.0.join("pipe.status"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let server = Server::start(&folder, "127.0.0.1:0");
    // All of them ask at the same time, and the reading is one.
    let begun = Instant::now();
    let mut clients: Vec<_> = (0..40).map(|_| server.connect()).collect();
    for client in &mut clients {
        client.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    }
    for mut client in clients {
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        let parsed = parsed(&answer);
        assert_eq!(parsed.value("aquifer_memory_live_bytes", &[]), own[0] as f64);
        assert_eq!(parsed.value("aquifer_pools_unreadable", &[]), 8.0 * 256.0);
        assert_eq!(parsed.value("aquifer_processes", &[("state", "unreadable")]), 2.0);
    }
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    drop(held);
}

#[test]
fn other_machines_reach_it_only_by_the_flag_that_names_the_risk() {
    let folder = Scratch::new("exposed");
    for address in ["0.0.0.0:0", "[::]:0"] {
        let output = run(&folder, &["metrics", "--listen", address]);
        refused(&output, "--expose-to-network");
    }
    refused(
        &run(&folder, &["metrics", "--listen", "example.org:80"]),
        "invalid value 'example.org:80'",
    );
    refused(&run(&folder, &["metrics", "--expose-to-network"]), "--listen <ADDRESS>");
    let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = held.local_addr().unwrap().to_string();
    refused(&run(&folder, &["metrics", "--listen", &taken]), "cannot be listened on");
}
