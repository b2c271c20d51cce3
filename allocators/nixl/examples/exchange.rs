//! Two processes read and write each other's memory over NIXL, with the rate of each way.
//!
//! ```sh
//! AQUIFER_NIXL=.../libnixl_capi.so cargo run --release -p aquifer-nixl --example exchange -- 64
//! ```
//!
//! The number is the size in MiB. A second one is the GPU of the second process, 0 unless given. In
//! pinned host memory, and on a GPU where there is one: in mapped memory, and in memory of one
//! driver allocation, which more transports take. Prints `skipped` where there is no NIXL.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{DevicePool, PinnedBuf, PinnedPool, Request, Runtime, StableBlock, Stream};
use aquifer_nixl::{
    Direction, Nixl, NixlAgent, NixlRegistration, RegisteredBlock, RegisteredPart, RegisteredPool,
    RemoteRange,
};
use std::{
    env,
    error::Error,
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{self, Child, Command},
    sync::Arc,
    time::{Duration, Instant},
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const ROUNDS: u32 = 8;
const PATIENCE: Duration = Duration::from_secs(60);
/// What the second process gets, by its environment: the socket, the kind of memory, its MiB, and
/// the GPU.
const SOCKET: &str = "EXCHANGE_SOCKET";
const KIND: &str = "EXCHANGE_KIND";
const SIZE: &str = "EXCHANGE_MIB";
const GPU: &str = "EXCHANGE_GPU";

/// One side's memory: it is registered, filled with bytes, and looked at.
enum Memory {
    Pinned(RegisteredBlock),
    Device {
        block: StableBlock,
        registration: NixlRegistration,
        stream: Stream,
        /// For copies.
        pinned: PinnedPool,
    },
}

impl Memory {
    fn new(
        kind: &str,
        bytes: u64,
        gpu: usize,
        agent: &NixlAgent,
        runtime: &Runtime,
    ) -> Result<Self> {
        if kind == "pinned" {
            let pool = RegisteredPool::new(agent, runtime.pinned_near(gpu), bytes)?;
            return Ok(Self::Pinned(pool.allocate(bytes)?));
        }
        let pool: &DevicePool = runtime.device(gpu)?;
        let stream = pool.stream()?;
        let block = match kind {
            "mapped" => pool.alloc_stable(&stream, Request::bytes(bytes))?,
            _ => pool.alloc_stable_legacy(&stream, Request::bytes(bytes))?,
        };
        // All of the block stays where it is as long as it is registered.
        let registration = agent.register(Arc::new(block.register()))?;
        let pinned = runtime.pinned_near(gpu).clone();
        Ok(Self::Device { block, registration, stream, pinned })
    }

    fn part(&self) -> Result<RegisteredPart> {
        Ok(match self {
            Self::Pinned(block) => block.part().clone(),
            Self::Device { registration, .. } => {
                registration.part(0, registration.range().bytes)?
            }
        })
    }

    fn fill(&mut self, seed: u8) -> Result<()> {
        let content = content(seed, self.part()?.range().bytes);
        match self {
            Self::Pinned(block) => block.copy_from(0, &content)?,
            Self::Device { block, stream, pinned, .. } => {
                let mut to = block.slice_mut::<u8>(0..content.len())?;
                stream.upload(PinnedBuf::copy_in(pinned, &content)?, &mut to)?.wait()?;
            }
        }
        Ok(())
    }

    fn is(&self, seed: u8) -> Result<bool> {
        let expected = content(seed, self.part()?.range().bytes);
        Ok(match self {
            Self::Pinned(block) => {
                let mut found = vec![0; expected.len()];
                block.copy_to(0, &mut found)?;
                found == expected
            }
            Self::Device { block, stream, pinned, .. } => {
                let from = block.slice::<u8>(0..expected.len())?;
                let found = stream.download(&from, pinned.buffer::<u8>(expected.len())?)?.wait()?;
                found[..] == expected[..]
            }
        })
    }
}

/// Bytes that no two seeds share.
fn content(seed: u8, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8 ^ seed).collect()
}

fn agent(name: &str) -> Result<NixlAgent> {
    let agent = NixlAgent::new(&Nixl::open()?, name)?;
    agent.add_backend("UCX", &[])?;
    Ok(agent)
}

fn send(socket: &mut UnixStream, bytes: &[u8]) -> Result<()> {
    socket.write_all(&(bytes.len() as u32).to_le_bytes())?;
    Ok(socket.write_all(bytes)?)
}

fn receive(socket: &mut UnixStream) -> Result<Vec<u8>> {
    let mut length = [0; 4];
    socket.read_exact(&mut length)?;
    let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
    socket.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The second process: it offers memory, and sees what was written.
fn serve(socket: &Path, kind: &str, bytes: u64, gpu: usize) -> Result<()> {
    let mut socket = UnixStream::connect(socket)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let runtime = Runtime::builder().or_sim().build()?;
    let agent = agent("server")?;
    let mut memory = Memory::new(kind, bytes, gpu, &agent, &runtime)?;
    memory.fill(1)?;
    send(&mut socket, &agent.metadata()?)?;
    send(&mut socket, &memory.part()?.location().to_bytes())?;
    let begun = Instant::now();
    while !agent.messages()?.iter().any(|message| message.message == b"written") {
        if begun.elapsed() > PATIENCE {
            return Err("no message of the other process".into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let answer = if memory.is(2)? { "equal" } else { "other bytes" };
    send(&mut socket, answer.as_bytes())
}

/// The second process, which ends with this one, and its socket.
struct Server(Child, PathBuf);

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended by itself, or waits for nothing any more.
        let _ = self.0.kill();
        let _ = self.0.wait();
        let _ = std::fs::remove_file(&self.1);
    }
}

fn exchange(kind: &str, bytes: u64, gpu: usize, runtime: &Runtime) -> Result<()> {
    let path = env::temp_dir().join(format!("aquifer-exchange-{}-{kind}", process::id()));
    let listener = UnixListener::bind(&path)?;
    let mut command = Command::new(env::current_exe()?);
    let server = command
        .env(SOCKET, &path)
        .env(KIND, kind)
        .env(SIZE, (bytes >> 20).to_string())
        .env(GPU, gpu.to_string());
    let server = server.spawn()?;
    let mut server = Server(server, path);
    listener.set_nonblocking(true)?;
    let begun = Instant::now();
    let mut socket = loop {
        match listener.accept() {
            Ok((socket, _)) => break socket,
            Err(_) if server.0.try_wait()?.is_none() && begun.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error.into()),
        }
    };
    socket.set_nonblocking(false)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let agent = agent("client")?;
    let mut memory = Memory::new(kind, bytes, 0, &agent, runtime)?;
    memory.fill(2)?;
    let written = Memory::new(kind, bytes, 0, &agent, runtime)?;
    let peer = agent.add_peer(&receive(&mut socket)?)?;
    let location: [u8; 24] = receive(&mut socket)?.try_into().map_err(|_| "no location")?;
    let theirs = [RemoteRange::from_bytes(location)?];
    let rate = |direction, part: RegisteredPart, message: Option<&[u8]>| -> Result<f64> {
        let begun = Instant::now();
        let parts = [part];
        agent.transfer(direction, &peer, &parts, &theirs, message)?.wait(PATIENCE)?;
        Ok(bytes as f64 / begun.elapsed().as_secs_f64() / 1e9)
    };
    let mut read: f64 = 0.0;
    for _ in 0..ROUNDS {
        read = read.max(rate(Direction::Read, written.part()?, None)?);
    }
    if !written.is(1)? {
        return Err(format!("{kind}: other bytes were read").into());
    }
    let mut wrote: f64 = 0.0;
    for round in 1..=ROUNDS {
        let message = (round == ROUNDS).then_some(&b"written"[..]);
        wrote = wrote.max(rate(Direction::Write, memory.part()?, message)?);
    }
    if receive(&mut socket)? != b"equal" {
        return Err(format!("{kind}: other bytes were written").into());
    }
    println!("{kind}: reads {read:.1} GB/s, writes {wrote:.1} GB/s, all bytes equal");
    Ok(())
}

fn main() -> Result<()> {
    let served = env::var(SIZE).ok();
    let size = served.or_else(|| env::args().nth(1)).map_or(Ok(64), |size| size.parse::<u16>())?;
    let bytes = u64::from(size.max(1)) << 20;
    let gpu = env::var(GPU).ok().or_else(|| env::args().nth(2));
    let gpu = gpu.map_or(Ok(0), |gpu| gpu.parse::<usize>())?;
    if let (Some(socket), Ok(kind)) = (env::var_os(SOCKET), env::var(KIND)) {
        return serve(Path::new(&socket), &kind, bytes, gpu);
    }
    if let Err(error) = Nixl::open() {
        println!("skipped: {error}");
        return Ok(());
    }
    let runtime = Runtime::builder().or_sim().build()?;
    let kinds: &[&str] = match runtime.simulator() {
        Some(_) => &["pinned"],
        None => &["pinned", "mapped", "legacy"],
    };
    let mut failed = Vec::new();
    for kind in kinds {
        if let Err(error) = exchange(kind, bytes, gpu, &runtime) {
            println!("{kind}: {error}");
            failed.push(kind);
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {failed:?}").into()) }
}
