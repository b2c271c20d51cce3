//! Two copies of a server share one GPU. One of them is killed, and the other has its memory.
//!
//! The GPU is simulated, with 96 MiB that each copy could fill by itself. The copies know nothing
//! of each other but the folder of the ledger.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{Bytes, MemoryError, Request, Runtime, sim::Sim};
// The reader of ledgers, as `aquifer top` has it.
use aquifer_status::ledger::{Ledger, LedgerFigures};
use std::{
    env,
    error::Error,
    fs,
    path::Path,
    process::{self, Child, Command},
    thread,
    time::{Duration, Instant},
};

const CAPACITY: u64 = 96 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// A server: its sequences grow as far as there is memory, then it drops the oldest. It never ends.
fn serve(folder: &Path, guarantee: u64) -> Result<(), MemoryError> {
    let rt = Runtime::builder()
        .driver(Sim::h200(1).capacity(CAPACITY).driver())
        .shared(guarantee)
        .ledger_folder(folder)
        .build()?;
    let pool = rt.device(0)?;
    let stream = pool.stream()?;
    let mut sequences = Vec::new();
    let begun = Instant::now();
    // A copy whose parent has died ends by itself.
    while begun.elapsed() < PATIENCE {
        match pool.alloc(&stream, Request::bytes(4 << 20)) {
            Ok(block) => sequences.push(block),
            Err(MemoryError::OutOfMemory(_)) => {
                let oldest = sequences.len().min(4);
                drop(sequences.drain(..oldest));
            }
            Err(other) => return Err(other),
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Waits until the ledger shows what `is_reached` tests.
fn wait_for(
    ledger: &Ledger,
    is_reached: impl Fn(&LedgerFigures) -> bool,
) -> Result<LedgerFigures, Box<dyn Error>> {
    let begun = Instant::now();
    loop {
        let figures = ledger.figures();
        if figures.claimed() > CAPACITY {
            return Err(format!("more is claimed than there is: {figures:?}").into());
        }
        if is_reached(&figures) {
            return Ok(figures);
        }
        if begun.elapsed() > PATIENCE {
            return Err(format!("not within {PATIENCE:?}: {figures:?}").into());
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn share(folder: &Path, copies: &mut Vec<Child>) -> Result<(), Box<dyn Error>> {
    for guarantee in [56 << 20, 40 << 20] {
        let mut copy = Command::new(env::current_exe()?);
        copies.push(copy.arg(folder).arg(u64::to_string(&guarantee)).spawn()?);
    }
    let ledger = Ledger::open(folder, "simulated-0", CAPACITY)?;
    let both = wait_for(&ledger, |figures| {
        figures.members.len() == 2
            && figures.members.iter().all(|member| member.claimed >= 16 << 20)
            && figures.free() < 8 << 20
    })?;
    for member in &both.members {
        println!("process {} holds {}", member.process, Bytes(member.claimed));
    }
    copies[0].kill()?;
    copies[0].wait()?;
    let died = Instant::now();
    let shown = ledger.figures();
    if shown.members.len() != 1 {
        return Err(format!("a dead process has a claim: {shown:?}").into());
    }
    let one = wait_for(&ledger, |figures| figures.claimed() >= 88 << 20)?;
    println!("one is killed; {:?} later the other holds {}", died.elapsed(), Bytes(one.claimed()));
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let [folder, guarantee] = &arguments[..] {
        return Ok(serve(Path::new(folder), guarantee.parse()?)?);
    }
    let folder = env::temp_dir().join(format!("aquifer-shared-gpu-{}", process::id()));
    let mut copies = Vec::new();
    let shared = share(&folder, &mut copies);
    for copy in &mut copies {
        // One of them is dead already.
        let _dead = copy.kill();
        let _waited = copy.wait();
    }
    fs::remove_dir_all(&folder)?;
    shared
}
