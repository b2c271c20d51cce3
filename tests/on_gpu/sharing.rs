//! Tests of blocks between two processes on a real GPU.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]
#![expect(unsafe_code, reason = "receives memory that another process works with")]

use crate::{
    first_gpu::{self, RuntimeInTurn},
    itself::itself,
};
use aquifer::{
    Budget, DeviceBuffer, DevicePool, PoolConfig, Request, Stream,
    device::{ReceivedBlock, ShareError, ShareServer, check_peer},
    driver::ExportTypes,
};
use std::{
    env,
    io::{Read, Write},
    os::{
        fd::AsFd,
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    process::{self, Child},
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;
/// Names the socket of the sender, in the receiver.
const SOCKET: &str = "AQUIFER_TEST_SENDER";

/// Returns a pool under a limit in MiB on the first GPU, or prints why there is none.
fn pool(limit: u64, shareable: bool) -> Option<(RuntimeInTurn, DevicePool)> {
    let rt = first_gpu::runtime()?;
    let first = rt.device(0).unwrap();
    let info = first.info();
    if !info.virtual_memory || info.export_types.missing(ExportTypes::POSIX_FD).is_some() {
        println!("skipped: {} cannot export memory as files", info.name);
        return None;
    }
    let mut config = PoolConfig::with_budget(Budget::new("the device", limit * MIB));
    config.shareable = shareable;
    config.export = if shareable { ExportTypes::POSIX_FD } else { ExportTypes::NONE };
    let driver = rt.driver().unwrap().clone();
    let pool = DevicePool::open(driver, first.device(), config).unwrap();
    Some((rt, pool))
}

fn address(name: &str) -> SocketAddr {
    SocketAddr::from_abstract_name(name).unwrap()
}

fn filled(pool: &DevicePool, s: &Stream, bytes: u64, byte: u8) -> DeviceBuffer<u8> {
    let mut buffer = pool.buffer(s, bytes as usize).unwrap();
    s.fill(&mut buffer, byte).unwrap();
    buffer
}

fn is_all(s: &Stream, buffer: &DeviceBuffer<u8>, byte: u8) -> bool {
    let mut back = vec![0; buffer.len()];
    s.scope(|c| c.download(buffer, &mut back)).unwrap().unwrap();
    back.iter().all(|&found| found == byte)
}

fn received_is_all(s: &Stream, block: &ReceivedBlock, byte: u8) -> bool {
    let mut back = vec![0; block.bytes() as usize];
    let all = block.slice::<u8>(0..back.len()).unwrap();
    s.scope(|c| c.download(all, &mut back)).unwrap().unwrap();
    back.iter().all(|&found| found == byte)
}

/// Starts this program as the receiver, and returns its connection.
fn receiver() -> (Child, UnixStream) {
    let name = format!("aquifer-test-{}", process::id());
    let listener = UnixListener::bind_addr(&address(&name)).unwrap();
    let child = itself("sharing::the_other_process").env(SOCKET, &name).spawn().unwrap();
    let (socket, _) = listener.accept().unwrap();
    check_peer(&socket).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    (child, socket)
}

/// Has the receiver check that its bytes are all this.
fn sees(mut socket: &UnixStream, byte: u8) -> bool {
    socket.write_all(&[byte]).unwrap();
    let mut answer = [0];
    socket.read_exact(&mut answer).unwrap();
    answer == [1]
}

#[test]
#[ignore = "is a process that another test starts"]
fn the_other_process() {
    let Ok(name) = env::var(SOCKET) else { return };
    let mut socket = UnixStream::connect_addr(&address(&name)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let Some((_rt, pool)) = pool(64, false) else { return };
    let s = pool.stream().unwrap();
    // SAFETY: 1. Each process synchronises before the other one works. 2. The sender frees its
    // block after the close.
    let mut theirs = unsafe { pool.receive(&s, &socket) }.unwrap();
    assert_eq!(pool.budget().used(), 0, "charged where it was created");
    loop {
        let mut asked = [0];
        socket.read_exact(&mut asked).unwrap();
        match asked {
            [0] => break,
            [0xff] => {
                let all = 0..theirs.bytes() as usize;
                s.fill(&mut theirs.slice_mut::<u8>(all).unwrap(), 0xff).unwrap();
                s.synchronize().unwrap();
                socket.write_all(&[1]).unwrap();
            }
            [byte] => socket.write_all(&[received_is_all(&s, &theirs, byte).into()]).unwrap(),
        }
    }
    assert_eq!(theirs.close(), Ok(true));
    socket.write_all(&[1]).unwrap();
}

#[test]
fn another_process_maps_a_block_whose_surroundings_are_compacted() {
    let Some((_rt, pool)) = pool(512, true) else { return };
    let s = pool.stream().unwrap();
    let mut blocks: Vec<_> = (1..=16).map(|n| Some(filled(&pool, &s, 30 * MIB + 512, n))).collect();
    let kept = blocks[8].take().unwrap();
    let shared = pool.share(kept.block(), "the ninth").unwrap();
    s.synchronize().unwrap();
    let (mut child, socket) = receiver();
    let start = Instant::now();
    shared.send(&socket).unwrap();
    assert!(sees(&socket, 9), "the same bytes");
    println!("{} handles sent and read in {:?}", shared.handles(), start.elapsed());
    let moves = pool.stats().moves;
    blocks.iter_mut().step_by(2).for_each(|block| drop(block.take()));
    let large = filled(&pool, &s, 200 * MIB, 0x77);
    s.synchronize().unwrap();
    assert!(pool.stats().moves > moves, "handles have moved");
    pool.trim(0).unwrap();
    assert!(sees(&socket, 9) && is_all(&s, &kept, 9) && is_all(&s, &large, 0x77));
    assert!(sees(&socket, 0xff), "the other process writes");
    assert!(is_all(&s, &kept, 0xff));
    assert!(sees(&socket, 0), "and closes");
    assert!(child.wait().unwrap().success());
    drop((blocks, large, kept, shared));
    s.synchronize().unwrap();
    pool.trim(0).unwrap();
    assert_eq!(pool.budget().used(), 0);
}

#[test]
fn a_receiver_that_is_killed_leaves_the_block_to_its_sender() {
    let Some((_rt, pool)) = pool(64, true) else { return };
    let s = pool.stream().unwrap();
    let kept = filled(&pool, &s, 20 * MIB, 5);
    s.synchronize().unwrap();
    for _ in 0..2 {
        let (mut child, socket) = receiver();
        pool.share(kept.block(), "").unwrap().send(&socket).unwrap();
        assert!(sees(&socket, 5));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(is_all(&s, &kept, 5));
    }
    drop(kept);
    s.synchronize().unwrap();
    pool.trim(0).unwrap();
    assert_eq!(pool.budget().used(), 0);
}

#[test]
fn the_driver_maps_no_more_bytes_than_a_handle_has() {
    let Some((_rt, pool)) = pool(64, true) else { return };
    let (driver, device) = (pool.driver(), pool.device());
    let bytes = pool.info().granularity;
    let ours = driver.handle_create(device, bytes, ExportTypes::POSIX_FD).unwrap();
    let descriptor = driver.handle_export(ours).unwrap();
    // SAFETY: 1. The memory is not used.
    let theirs = unsafe { driver.handle_import(device, descriptor.as_fd()) }.unwrap();
    let address = driver.address_reserve(device, 2 * bytes, 0).unwrap();
    // SAFETY: 1. The range is new.
    assert!(unsafe { driver.map(address, 2 * bytes, theirs) }.is_err());
    // SAFETY: 1. Nothing is mapped there.
    unsafe { driver.address_free(device, address, 2 * bytes) }.unwrap();
    for handle in [theirs, ours] {
        // SAFETY: 1. It is not mapped, and nothing else has it.
        unsafe { driver.handle_release(handle) }.unwrap();
    }
}

/// Byte `at` of the blocks that are served.
fn served_byte(at: usize, seed: u8) -> u8 {
    (at as u32).wrapping_mul(0x9e37_79b1).to_le_bytes()[3] ^ seed
}

/// Serves a new stable block with these contents, which is freed at once.
fn serve(pool: &DevicePool, server: &ShareServer, bytes: u64, seed: u8, read_only: bool) -> u64 {
    let s = pool.stream().unwrap();
    let mut block = pool.alloc_stable(&s, Request::bytes(bytes)).unwrap();
    let contents: Vec<u8> = (0..bytes as usize).map(|at| served_byte(at, seed)).collect();
    let mut all = block.slice_mut::<u8>(0..contents.len()).unwrap();
    s.scope(|c| c.upload(&contents, &mut all)).unwrap().unwrap();
    let shared = pool.share(block.block(), "weights").unwrap();
    server.serve(if read_only { shared.read_only() } else { shared })
}

const SERVED: u64 = 100 * MIB + 4096;
/// Names the socket of the owner, in the process that serves.
const SERVER: &str = "AQUIFER_TEST_SERVER";

#[test]
#[ignore = "is a process that another test starts"]
fn the_process_that_serves() {
    let Ok(name) = env::var(SERVER) else { return };
    let Some((_rt, pool)) = pool(512, true) else { return };
    let server = ShareServer::bind(&address(&name)).unwrap();
    for (round, read_only) in [(1, true), (2, false)] {
        println!("serves {}", serve(&pool, &server, SERVED, round, read_only));
        if std::io::stdin().read(&mut [0]).unwrap() == 0 {
            return;
        }
    }
}

#[test]
fn two_processes_share_a_block_by_name_and_one_keeps_it_when_the_other_is_killed() {
    let Some((_rt, pool)) = pool(512, false) else { return };
    let (s, wait) = (pool.stream().unwrap(), Duration::from_secs(60));
    let name = format!("aquifer-test-served-{}", process::id());
    let mut owner = itself("sharing::the_process_that_serves")
        .env(SERVER, &name)
        .stdin(process::Stdio::piped())
        .stdout(process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(owner.stdout.take().unwrap()));
    let mut served = || {
        let line = lines.find_map(|line| {
            // Behind the name of the test, which the harness prints on the same line.
            line.unwrap().rsplit_once("serves ").map(|(_, generation)| generation.to_owned())
        });
        line.unwrap().parse::<u64>().unwrap()
    };
    let open = |timeout| {
        // SAFETY: 1. The owner writes before it serves, and not afterwards. 2. It serves stable
        // blocks.
        unsafe { pool.open_shared(&s, &address(&name), "weights", timeout) }
    };
    let is_served = |block: &ReceivedBlock, seed: u8| {
        let mut back = vec![0; block.bytes() as usize];
        let all = block.slice::<u8>(0..back.len()).unwrap();
        s.scope(|c| c.download(all, &mut back)).unwrap().unwrap();
        back.iter().enumerate().all(|(at, &found)| found == served_byte(at, seed))
    };
    let first = served();
    let start = Instant::now();
    let only_read = open(wait).unwrap();
    println!("{} bytes opened in {:?}", only_read.bytes(), start.elapsed());
    assert_eq!((only_read.bytes(), only_read.generation()), (SERVED, first));
    assert!(only_read.is_read_only() && is_served(&only_read, 1), "every byte");
    assert_eq!(pool.budget().used(), 0, "charged where it was created");
    owner.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    assert!(served() > first && !only_read.is_current(wait).unwrap());
    let mut both = open(wait).unwrap();
    assert!(is_served(&both, 2) && is_served(&only_read, 1), "each has its own bytes");
    owner.kill().unwrap();
    owner.wait().unwrap();
    assert!(is_served(&only_read, 1) && is_served(&both, 2), "the driver keeps the memory");
    s.fill(&mut both.slice_mut::<u8>(0..SERVED as usize).unwrap(), 0x5a).unwrap();
    assert!(received_is_all(&s, &both, 0x5a) && is_served(&only_read, 1));
    assert!(matches!(open(wait), Err(ShareError::NoServer(_))));
    assert_eq!((only_read.close(), both.close()), (Ok(true), Ok(true)));
}
