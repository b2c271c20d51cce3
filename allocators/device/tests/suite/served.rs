//! Tests of blocks that one process serves by name and others open: the same bytes,
//! and errors with types when either side dies, stops or says anything else.
//!
//! The other processes are this program. They are driven by single bytes over their standard input
//! and output.
#![expect(unsafe_code, reason = "opens memory that others work with")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::{
    itself::itself,
    support::{MIB, Rig},
};
use aquifer_core::MemoryError;
use aquifer_device::{DevicePool, PoolConfig, ReceivedBlock, ShareError, ShareServer};
use aquifer_driver::{
    DeviceId, ExportTypes,
    sim::{Sim, ViolationKind},
};
use aquifer_stream::Stream;
use nix::{
    libc,
    sys::{
        signal::{Signal, kill},
        wait::waitpid,
    },
    unistd::Pid,
};
use std::{
    env, fs,
    io::{self, Read, Write},
    os::{
        linux::net::SocketAddrExt,
        unix::{
            fs::symlink,
            net::{SocketAddr, UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    process::{self, Child, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

const BYTES: u64 = 3 * MIB + 4096;
const SOON: Duration = Duration::from_secs(20);
const SOCKET: &str = "AQUIFER_TEST_SOCKET";

/// A folder of its own, and the path of a socket in it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = env::temp_dir().join(format!("aquifer-served-{}-{number}", process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn socket(&self) -> PathBuf {
        self.0.join("socket")
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::from_pathname(self.socket()).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn exporting() -> Rig {
    Rig::on(Sim::h200(1), 64, |config| config.export = ExportTypes::POSIX_FD)
}

/// Byte `at` of the block of this generation of contents.
fn byte(at: usize, seed: u8) -> u8 {
    (at as u32).wrapping_mul(0x9e37_79b1).to_le_bytes()[3] ^ seed
}

fn contents(seed: u8) -> Vec<u8> {
    (0..BYTES as usize).map(|at| byte(at, seed)).collect()
}

fn open(
    pool: &DevicePool,
    s: &Stream,
    address: &SocketAddr,
    name: &str,
    timeout: Duration,
) -> Result<ReceivedBlock, ShareError> {
    // SAFETY: 1. The tests order all work, across processes by their messages. 2. All blocks that
    // are served are stable ones, or outlive their openers.
    unsafe { pool.open_shared(s, address, name, timeout) }
}

fn read(s: &Stream, block: &ReceivedBlock) -> Vec<u8> {
    let mut back = vec![0; block.bytes() as usize];
    let all = block.slice::<u8>(0..back.len()).unwrap();
    s.scope(|c| c.download(all, &mut back)).unwrap().unwrap();
    back
}

/// Serves a new stable block with these contents, which is freed at once.
fn serve(rig: &Rig, server: &ShareServer, name: &str, seed: u8) -> u64 {
    let s = rig.stream();
    let mut block = rig.stable(&s, BYTES);
    let contents = contents(seed);
    let mut all = block.slice_mut::<u8>(0..contents.len()).unwrap();
    s.scope(|c| c.upload(&contents, &mut all)).unwrap().unwrap();
    server.serve(rig.pool.share(block.block(), name).unwrap())
}

/// Another process, which is killed when this is dropped.
struct Other(Child);

impl Other {
    fn start(test: &str, folder: &Folder) -> Self {
        let child = itself(test)
            .arg("--quiet")
            .env(SOCKET, folder.socket())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        Self(child.unwrap())
    }

    /// Waits for a line that starts with `word`, and returns the rest of it.
    fn says(&mut self, word: &str) -> String {
        let (mut line, mut next) = (Vec::new(), [0]);
        let output = self.0.stdout.as_mut().unwrap();
        loop {
            assert_ne!(output.read(&mut next).unwrap(), 0, "it has ended before it said {word}");
            if next != *b"\n" {
                line.extend(next);
                continue;
            }
            let text = String::from_utf8(std::mem::take(&mut line)).unwrap();
            if let Some((_, rest)) = text.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }

    fn tell(&mut self) {
        self.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.0.id().cast_signed())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// The socket, in another process; `None` in the run of all tests.
fn socket_of_parent() -> Option<SocketAddr> {
    let path = env::var_os(SOCKET)?;
    Some(SocketAddr::from_pathname(Path::new(&path)).unwrap())
}

/// Waits until the parent lets this process go on. It does not outlive its parent.
fn wait_for_parent() {
    if io::stdin().read(&mut [0]).unwrap() == 0 {
        process::exit(1);
    }
}

#[test]
#[ignore = "is a process that another test starts"]
fn a_process_that_serves() {
    let Some(address) = socket_of_parent() else { return };
    let rig = exporting();
    let server = ShareServer::bind(&address).unwrap();
    for seed in [1, 2] {
        println!("serves {}", serve(&rig, &server, "weights", seed));
        wait_for_parent();
    }
    assert!(server.withdraw("weights"));
    println!("withdrawn");
    wait_for_parent();
}

#[test]
#[ignore = "is a process that another test starts"]
fn a_process_that_opens() {
    let Some(address) = socket_of_parent() else { return };
    let rig = Rig::new(64);
    let s = rig.stream();
    let mut block = open(&rig.pool, &s, &address, "weights", SOON).unwrap();
    assert_eq!(read(&s, &block), contents(1));
    println!("opened {}", block.generation());
    wait_for_parent();
    s.fill(&mut block.slice_mut::<u8>(0..BYTES as usize).unwrap(), 0x5a).unwrap();
    s.synchronize().unwrap();
    println!("written");
    wait_for_parent();
}

#[test]
fn two_processes_see_the_same_bytes_and_generations_tell_them_apart() {
    let (folder, rig) = (Folder::new(), Rig::new(64));
    let (address, s) = (folder.address(), rig.stream());
    let mut owner = Other::start("served::a_process_that_serves", &folder);
    let first: u64 = owner.says("serves").parse().unwrap();
    let before = open(&rig.pool, &s, &address, "weights", SOON).unwrap();
    assert_eq!((before.name(), before.bytes(), before.generation()), ("weights", BYTES, first));
    assert_eq!(read(&s, &before), contents(1));
    assert!(before.is_current(SOON).unwrap());
    assert_eq!((rig.budget.used(), rig.pool.stats().physical), (0, 0), "charged to its owner");
    owner.tell();
    let second: u64 = owner.says("serves").parse().unwrap();
    assert!(second > first && !before.is_current(SOON).unwrap());
    let after = open(&rig.pool, &s, &address, "weights", SOON).unwrap();
    assert_eq!(after.generation(), second);
    assert_eq!((read(&s, &before), read(&s, &after)), (contents(1), contents(2)));
    owner.tell();
    owner.says("withdrawn");
    let refused = open(&rig.pool, &s, &address, "weights", SOON).unwrap_err();
    assert!(matches!(&refused, ShareError::NotServed { name } if name == "weights"), "{refused}");
    assert!(!after.is_current(SOON).unwrap());
    assert_eq!((read(&s, &before), read(&s, &after)), (contents(1), contents(2)));
    assert_eq!((before.close(), after.close()), (Ok(true), Ok(true)));
    rig.assert_silent();
}

#[test]
fn an_opener_keeps_its_bytes_when_the_owner_is_killed_and_the_next_server_takes_its_place() {
    let (folder, rig) = (Folder::new(), exporting());
    let (address, s) = (folder.address(), rig.stream());
    let mut owner = Other::start("served::a_process_that_serves", &folder);
    let dead: u64 = owner.says("serves").parse().unwrap();
    let opened = open(&rig.pool, &s, &address, "weights", SOON).unwrap();
    assert!(matches!(ShareServer::bind(&address), Err(ShareError::Io(error))
        if error.kind() == io::ErrorKind::AddrInUse));
    owner.kill();
    assert_eq!(read(&s, &opened), contents(1));
    let refused = open(&rig.pool, &s, &address, "weights", SOON).unwrap_err();
    assert!(matches!(refused, ShareError::NoServer(_)), "{refused}");
    assert!(matches!(opened.is_current(SOON), Err(ShareError::NoServer(_))));
    // The dead server's socket is still there.
    assert!(folder.socket().exists());
    let server = ShareServer::bind(&address).unwrap();
    assert!(serve(&rig, &server, "weights", 3) > dead, "no generation is used again");
    assert!(!opened.is_current(SOON).unwrap());
    let next = open(&rig.pool, &s, &address, "weights", SOON).unwrap();
    assert_eq!((read(&s, &opened), read(&s, &next)), (contents(1), contents(3)));
}

#[test]
fn an_opener_that_is_killed_leaves_the_memory_to_its_owner_and_to_others() {
    let (folder, rig) = (Folder::new(), exporting());
    let server = ShareServer::bind(&folder.address()).unwrap();
    let generation = serve(&rig, &server, "weights", 1);
    let mut openers = [0, 1].map(|_| Other::start("served::a_process_that_opens", &folder));
    for opener in &mut openers {
        assert_eq!(opener.says("opened"), generation.to_string());
    }
    let [first, second] = &mut openers;
    first.kill();
    second.tell();
    second.says("written");
    let (other, s) = (exporting(), rig.stream());
    // The owner's own mapping of it, by the same way.
    let own = open(&rig.pool, &s, &folder.address(), "weights", SOON).unwrap();
    assert_eq!(read(&s, &own), vec![0x5a; BYTES as usize], "what the other process has written");
    second.kill();
    assert_eq!(read(&s, &own), vec![0x5a; BYTES as usize]);
    own.close().unwrap();
    assert_eq!(rig.budget.used(), 4 * MIB, "the server keeps it");
    drop((server, other));
    s.synchronize().unwrap();
    rig.assert_empty();
}

#[test]
fn a_stopped_owner_is_given_up_in_time() {
    let (folder, rig) = (Folder::new(), Rig::new(64));
    let s = rig.stream();
    let mut owner = Other::start("served::a_process_that_serves", &folder);
    owner.says("serves");
    kill(owner.pid(), Signal::SIGSTOP).unwrap();
    waitpid(owner.pid(), Some(nix::sys::wait::WaitPidFlag::WUNTRACED)).unwrap();
    let begun = Instant::now();
    let wait = Duration::from_millis(50);
    let refused = open(&rig.pool, &s, &folder.address(), "weights", wait).unwrap_err();
    assert!(matches!(refused, ShareError::TimedOut), "{refused}");
    assert!(begun.elapsed() >= wait && begun.elapsed() < SOON);
    kill(owner.pid(), Signal::SIGCONT).unwrap();
    assert_eq!(
        read(&s, &open(&rig.pool, &s, &folder.address(), "weights", SOON).unwrap()),
        contents(1)
    );
}

#[test]
fn a_read_only_block_is_not_written() {
    let (folder, rig) = (Folder::new(), exporting());
    let s = rig.stream();
    let server = ShareServer::bind(&folder.address()).unwrap();
    let mut block = rig.stable(&s, BYTES);
    s.fill(&mut block.slice_mut::<u8>(0..BYTES as usize).unwrap(), 7).unwrap();
    server.serve(rig.pool.share(block.block(), "weights").unwrap().read_only());
    let mut theirs = open(&rig.pool, &s, &folder.address(), "weights", SOON).unwrap();
    assert!(theirs.is_read_only());
    assert_eq!(read(&s, &theirs), vec![7; BYTES as usize]);
    let refused = theirs.slice_mut::<u8>(0..1).map(drop).unwrap_err();
    assert!(matches!(refused, MemoryError::Unsupported { .. }), "{refused}");
    rig.assert_silent();
    // A kernel that writes all the same.
    let (raw, range) = (s.raw(), theirs.range());
    let _refused = rig.sim.access(raw, range, aquifer_driver::Access::Write, None);
    let _failed = s.synchronize();
    let kinds: Vec<_> = rig.sim.take_violations().iter().map(|found| found.kind).collect();
    assert_eq!(kinds, [ViolationKind::NoAccess { device: DeviceId(0) }]);
}

/// What an opener asks.
fn request(name: &str) -> Vec<u8> {
    let mut request = format!("aqask-4 1 {name}").into_bytes();
    request.resize(256, 0);
    request
}

/// A connection of a client that says what it likes.
fn connect(folder: &Folder) -> UnixStream {
    let socket = UnixStream::connect_addr(&folder.address()).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket
}

#[test]
fn a_name_that_is_too_long_is_refused() {
    let (folder, rig) = (Folder::new(), exporting());
    let _listener = UnixListener::bind_addr(&folder.address()).unwrap();
    let long = "x".repeat(65);
    let refused = open(&rig.pool, &rig.stream(), &folder.address(), &long, SOON).unwrap_err();
    assert!(matches!(refused, ShareError::BadField { value: 65, .. }), "{refused}");
}

#[test]
fn a_server_replaces_no_file_that_is_not_a_dead_servers() {
    let folder = Folder::new();
    let path = folder.socket();
    let refused = || {
        let error = ShareServer::bind(&folder.address()).unwrap_err();
        let is_taken = |error: &io::Error| error.kind() == io::ErrorKind::AddrInUse;
        assert!(matches!(&error, ShareError::Io(error) if is_taken(error)), "{error}");
    };
    fs::write(&path, b"precious").unwrap();
    refused();
    assert_eq!(fs::read(&path).unwrap(), b"precious");
    fs::rename(&path, folder.0.join("target")).unwrap();
    symlink(folder.0.join("target"), &path).unwrap();
    refused();
    fs::remove_file(&path).unwrap();
    let server = ShareServer::bind(&folder.address()).unwrap();
    refused();
    drop(server);
    ShareServer::bind(&folder.address()).unwrap();
}

#[test]
fn openers_that_stall_or_say_nothing_delay_no_other() {
    let (folder, rig) = (Folder::new(), exporting());
    let (s, server) = (rig.stream(), ShareServer::bind(&folder.address()).unwrap());
    serve(&rig, &server, "weights", 1);
    let request = request("weights");
    let mut stalled = Vec::new();
    let mut connect = |said: &[u8]| {
        let mut socket = connect(&folder);
        socket.write_all(said).unwrap();
        stalled.push(socket);
    };
    // Far less than the two seconds that one of them has.
    let wait = Duration::from_millis(500);
    let opens = |what: &str| {
        let begun = Instant::now();
        let opened = open(&rig.pool, &s, &folder.address(), "weights", wait);
        let opened = opened.unwrap_or_else(|e| panic!("{what}: {e} after {:?}", begun.elapsed()));
        opened.close().unwrap();
    };
    for _ in 0..10 {
        connect(&request[..40]);
    }
    opens("half requests");
    for _ in 0..10 {
        connect(&request);
    }
    opens("answers that are not read");
    for _ in 0..300 {
        connect(&[]);
    }
    opens("idle connections");
    // All of them are dropped in the end, also without others that need their places.
    for mut socket in stalled {
        let _reset = socket.read_to_end(&mut Vec::new());
    }
    opens("nothing");
    rig.assert_silent();
}

/// Acts as another user, in the calling thread only. Returns whether the system allows it.
fn become_another_user() -> bool {
    const NOBODY: libc::c_long = 65534;
    // SAFETY: 1. The call takes three numbers, and changes the credentials of this thread.
    unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) == 0 }
}

#[test]
fn a_stranger_is_refused_on_either_side() {
    let rig = exporting();
    let address =
        SocketAddr::from_abstract_name(format!("aquifer-stranger-{}", process::id())).unwrap();
    let server = ShareServer::bind(&address).unwrap();
    serve(&rig, &server, "weights", 1);
    let s = rig.stream();
    let tried = thread::scope(|threads| {
        let stranger = threads.spawn(|| {
            if !become_another_user() {
                return None;
            }
            let opened = open(&rig.pool, &s, &address, "weights", SOON).map(drop);
            let mut socket = UnixStream::connect_addr(&address).unwrap();
            let _sent = socket.write_all(&request("weights"));
            let mut answer = Vec::new();
            let _ended = socket.read_to_end(&mut answer);
            Some((opened, answer))
        });
        stranger.join().unwrap()
    });
    let Some((opened, answer)) = tried else {
        println!("skipped: only root can act as another user");
        return;
    };
    let refused = opened.unwrap_err();
    assert!(matches!(refused, ShareError::OtherUser { .. }), "the opener refuses: {refused}");
    assert!(answer.is_empty(), "the server refuses");
    open(&rig.pool, &s, &address, "weights", SOON).unwrap().close().unwrap();
}

#[test]
fn a_dropped_server_ends_its_thread_and_frees_the_memory() {
    let (folder, rig) = (Folder::new(), exporting());
    let s = rig.stream();
    for round in 0..20 {
        let server = ShareServer::bind(&folder.address()).unwrap();
        serve(&rig, &server, "weights", round);
        drop(server);
        let refused = open(&rig.pool, &s, &folder.address(), "weights", SOON).unwrap_err();
        assert!(matches!(refused, ShareError::NoServer(_)), "{refused}");
    }
    s.synchronize().unwrap();
    rig.pool.trim(0).unwrap();
    assert_eq!((rig.budget.used(), rig.sim.outstanding().handles), (0, 0));
    let deadline = Instant::now() + SOON;
    let threads = || {
        let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
        let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).ok();
        tasks.filter_map(name).filter(|name| name.trim() == "aquifer-share").count()
    };
    // Servers of other tests run beside these.
    while threads() >= 20 {
        assert!(Instant::now() < deadline, "threads are left");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_pool_of_another_kind_of_memory_serves_too() {
    let folder = Folder::new();
    let rig = Rig::on(Sim::h200(1), 64, |config| config.shareable = true);
    let (s, server) = (rig.stream(), ShareServer::bind(&folder.address()).unwrap());
    let mut buffer = rig.bytes(&s, MIB);
    s.fill(&mut buffer, 9).unwrap();
    server.serve(rig.pool.share(buffer.block(), "cached").unwrap());
    let other = DevicePool::open(rig.sim.driver(), DeviceId(0), PoolConfig::default()).unwrap();
    let theirs = open(&other, &s, &folder.address(), "cached", SOON).unwrap();
    assert_eq!(read(&s, &theirs), vec![9; MIB as usize]);
    theirs.close().unwrap();
    rig.assert_silent();
}
