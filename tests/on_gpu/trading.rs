//! Two servers share one GPU by its ledger and trade its memory, until one of them is killed.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::{first_gpu, itself::itself};
use aquifer::{Bytes, DeviceBuffer, MemoryError, Runtime};
use aquifer_status::ledger::{Ledger, LedgerFigures};
use std::{
    env,
    path::{Path, PathBuf},
    process::{self, Child},
    thread,
    time::{Duration, Instant},
};

/// The folder of the ledger and the guarantee in per cent, in a server.
const FOLDER: &str = "AQUIFER_TEST_FOLDER";
const GUARANTEE: &str = "AQUIFER_TEST_GUARANTEE";
/// Elements of a sequence, of four bytes each.
const SEQUENCE: usize = 128 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
#[ignore = "is a process that another test starts"]
fn a_server() {
    let Ok(guarantee) = env::var(GUARANTEE) else { return };
    let guarantee: u64 = guarantee.parse().unwrap();
    let memory = first_gpu::runtime().unwrap().device(0).unwrap().info().memory;
    let rt = Runtime::builder()
        .shared(memory / 100 * guarantee)
        .device_budget(memory / 100 * 95)
        .ledger_folder(PathBuf::from(env::var_os(FOLDER).unwrap()))
        .build()
        .unwrap();
    let pool = rt.device(0).unwrap();
    let s = pool.stream().unwrap();
    let mut sequences: Vec<(DeviceBuffer<u32>, u32)> = Vec::new();
    let begun = Instant::now();
    // A server whose parent has died ends by itself.
    for number in process::id() << 12.. {
        if begun.elapsed() > PATIENCE {
            return;
        }
        match pool.buffer::<u32>(&s, SEQUENCE) {
            Ok(mut sequence) => {
                s.fill(&mut sequence, number).unwrap();
                sequences.push((sequence, number));
            }
            Err(MemoryError::OutOfMemory(_)) => {
                // What is dropped was written by this process alone.
                for (sequence, number) in sequences.drain(..sequences.len().min(4)) {
                    let mut back = [0_u32; 2];
                    let ends = [0..1, SEQUENCE - 1..SEQUENCE];
                    for (back, end) in back.iter_mut().zip(ends) {
                        let end = sequence.slice(end).unwrap();
                        let back = std::slice::from_mut(back);
                        s.scope(|c| c.download(end, back)).unwrap().unwrap();
                    }
                    assert_eq!(back, [number; 2], "its own bytes");
                }
            }
            // Memory of a process that was killed is the driver's for a while.
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn start(folder: &Path, guarantee: u64) -> Child {
    itself("trading::a_server")
        .env(FOLDER, folder)
        .env(GUARANTEE, guarantee.to_string())
        .spawn()
        .unwrap()
}

/// Waits until the ledger shows what `is_reached` tests, and returns how long that took.
fn wait_for(ledger: &Ledger, is_reached: impl Fn(&LedgerFigures) -> bool) -> Duration {
    let begun = Instant::now();
    loop {
        let figures = ledger.figures();
        assert!(figures.claimed() <= figures.capacity, "more than there is: {figures:?}");
        if is_reached(&figures) {
            return begun.elapsed();
        }
        assert!(begun.elapsed() < PATIENCE, "not reached: {figures:?}");
        thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn two_servers_trade_the_memory_of_a_gpu_and_one_has_the_rest_when_the_other_is_killed() {
    let Some(rt) = first_gpu::runtime() else { return };
    drop(rt);
    let folder = env::temp_dir().join(format!("aquifer-trading-{}", process::id()));
    let mut servers = [60, 40].map(|guarantee| start(&folder, guarantee));
    let begun = Instant::now();
    let name = loop {
        match Ledger::names(&folder).unwrap_or_default().pop() {
            Some(name) => break name,
            None => assert!(begun.elapsed() < PATIENCE, "no server starts"),
        }
        thread::sleep(Duration::from_millis(1));
    };
    let ledger = Ledger::existing(&folder, &name).unwrap();
    let full = |figures: &LedgerFigures| {
        figures.members.len() == 2
            && figures.members.iter().all(|member| member.claimed > figures.capacity / 5)
            && figures.free() < figures.capacity / 20
    };
    println!("both have shares after {:?}", wait_for(&ledger, full));
    // They go on: the claims move, and are never more than there is.
    let begun = Instant::now();
    let mut seen = Vec::new();
    while begun.elapsed() < Duration::from_secs(5) {
        wait_for(&ledger, |_| true);
        seen.push(ledger.figures().members.iter().map(|m| m.claimed).collect::<Vec<_>>());
        thread::sleep(Duration::from_millis(1));
    }
    seen.dedup();
    assert!(seen.len() > 10, "nothing is traded: {seen:?}");
    let before = ledger.figures();
    let dead = servers[0].id();
    servers[0].kill().unwrap();
    servers[0].wait().unwrap();
    let died = Instant::now();
    assert!(ledger.figures().members.iter().all(|member| member.process != dead));
    let claimed = |figures: &LedgerFigures| figures.members.iter().map(|m| m.claimed).sum::<u64>();
    let own = before.members.iter().filter(|m| m.process != dead).map(|m| m.claimed).sum::<u64>();
    wait_for(&ledger, |figures| claimed(figures) > own);
    let first = died.elapsed();
    wait_for(&ledger, |figures| claimed(figures) >= figures.capacity / 10 * 9);
    println!(
        "{} changes of claims; one is killed, the other grows beyond its {} after {first:?} and \
         holds nine tenths of {} after {:?}",
        seen.len(),
        Bytes(own),
        Bytes(before.capacity),
        died.elapsed(),
    );
    servers[1].kill().unwrap();
    servers[1].wait().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
}
