//! A server on tokio whose tenants have limits. A request beyond its tenant's limit waits as long
//! as its client allows, and is then refused with 503. Other tenants go on meanwhile.
//!
//! `cargo run --example tokio_server` plays the clients as well and checks their answers.
//! `cargo run --example tokio_server -- 127.0.0.1:8080` serves until it is stopped:
//! `curl -i http://127.0.0.1:8080/a/6/500` asks for 6 MiB of tenant `a`, and waits up to 500 ms.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{Budget, DeviceBuffer, MemoryError, Request, Runtime, Tenant};
use std::{
    collections::HashMap,
    env,
    error::Error,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

type Tenants = Arc<HashMap<&'static str, Tenant>>;

/// The work of one request: memory of its tenant, and something that the device does with it.
async fn work(tenant: &Tenant, bytes: u64, patience: Duration) -> Result<(), MemoryError> {
    let stream = tenant.pool().stream()?; // leased, and returned at the end
    let request = Request::bytes(bytes);
    // Other tasks run on this thread while this one waits for memory.
    let block = tenant.alloc_async(&stream, request).until(Instant::now() + patience).await?;
    let mut x: DeviceBuffer<u8> = DeviceBuffer::from_block(block)?;
    stream.fill(&mut x, 1)?; // your kernels
    stream.point().await // and while the device works
}

/// Answers one line, `GET /TENANT/MIB/MILLISECONDS`.
async fn answer(tenants: &Tenants, line: &str) -> (&'static str, String) {
    let mut parts = line.split(['/', ' ']).skip(2);
    let tenant = parts.next().and_then(|name| tenants.get(name));
    let mut number = || parts.next()?.parse::<u32>().ok().map(u64::from);
    let (Some(tenant), Some(mib), Some(wait)) = (tenant, number(), number()) else {
        return ("400 Bad Request", "GET /TENANT/MIB/MILLISECONDS\n".into());
    };
    match work(tenant, mib << 20, Duration::from_millis(wait)).await {
        Ok(()) => ("200 OK", format!("{mib} MiB of {} were used\n", tenant.budget().name())),
        Err(MemoryError::OutOfMemory(refused)) => {
            // By a limit, or else by the driver. The text names all holders: for the log.
            let (never, why) = match refused.refused {
                Some(by) => (by.requested > by.limit, by.to_string()),
                None => (false, refused.to_string()),
            };
            // What is larger than a limit never fits. Anything else can be tried again.
            let status = if never { "413 Content Too Large" } else { "503 Service Unavailable" };
            (status, format!("{why}\n"))
        }
        Err(other) => ("500 Internal Server Error", format!("{other}\n")),
    }
}

async fn connection(tenants: Tenants, mut socket: TcpStream) -> io::Result<()> {
    let mut line = String::new();
    BufReader::new(&mut socket).take(200).read_line(&mut line).await?;
    let (status, text) = answer(&tenants, &line).await;
    let whole = format!("HTTP/1.0 {status}\r\nContent-Length: {}\r\n\r\n{text}", text.len());
    socket.write_all(whole.as_bytes()).await?;
    socket.shutdown().await
}

async fn serve(listener: TcpListener, tenants: Tenants) -> io::Result<()> {
    loop {
        let (socket, _) = listener.accept().await?;
        tokio::spawn(connection(tenants.clone(), socket));
    }
}

/// A client: returns the status and the text.
async fn get(server: SocketAddr, path: &str) -> io::Result<(String, String)> {
    let mut socket = TcpStream::connect(server).await?;
    socket.write_all(format!("GET {path} HTTP/1.0\r\n").as_bytes()).await?;
    let mut whole = String::new();
    socket.read_to_string(&mut whole).await?;
    let status = whole.split(' ').nth(1).unwrap_or_default().to_owned();
    Ok((status, whole.lines().last().unwrap_or_default().to_owned()))
}

async fn run(tenants: Tenants) -> Result<(), Box<dyn Error>> {
    let given = env::args().nth(1);
    let listener = TcpListener::bind(given.as_deref().unwrap_or("127.0.0.1:0")).await?;
    let server = listener.local_addr()?;
    let serving = tokio::spawn(serve(listener, tenants.clone()));
    if given.is_some() {
        println!("http://{server}/a/6/500");
        return Ok(serving.await??);
    }

    // A request of tenant `a` is under way and has 6 MiB of its 8.
    let stream = tenants["a"].pool().stream()?;
    let held = tenants["a"].alloc(&stream, Request::bytes(6 << 20))?;
    let (busy, why) = get(server, "/a/6/50").await?;
    let (other, _) = get(server, "/b/6/50").await?;
    let (never, _) = get(server, "/a/9/60000").await?;
    println!("a is busy: {busy}, {why}\nb goes on: {other}; 9 MiB never fit: {never}");
    assert_eq!((&*busy, &*other, &*never), ("503", "200", "413"));

    // A client with more patience waits, and is served when the memory is free.
    let waiting = tokio::spawn(async move { get(server, "/a/6/60000").await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!waiting.is_finished());
    drop(held);
    let (patient, text) = waiting.await??;
    println!("one that waits: {patient}, {text}");
    assert_eq!((&*patient, tenants["a"].live()), ("200", 0));
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().or_sim().build()?;
    // Live bytes: 8 MiB for each tenant, 12 for both together.
    let all = Budget::new("all tenants", 12 << 20);
    let a = rt.device(0)?.for_tenant(&all.child("tenant a", 8 << 20))?;
    let b = rt.device(0)?.for_tenant(&all.child("tenant b", 8 << 20))?;
    let tenants = Arc::new(HashMap::from([("a", a), ("b", b)]));
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run(tenants))
}
