//! What the border costs: an allocation and its free through the C functions, beside the same
//! without them.
//!
//! ```text
//! cargo bench -p aquifer-ffi                      ns a pair, the middle of 15 rounds that take turns
//! cargo bench -p aquifer-ffi -- --count aq        one row, briefly, to be counted by callgrind:
//! valgrind --tool=callgrind --toggle-collect='*::measured' target/release/deps/border-* --count aq
//! ```
//!
//! The device is simulated and checks nothing, so that what is left is the library.
#![expect(unsafe_code, reason = "calls what C calls")]
#![expect(clippy::print_stdout, reason = "a benchmark shows what it found")]

use aquifer::{DevicePool, Request, Runtime, Stream, sim::Sim};
use aquifer_ffi::{
    device::{aq_alloc, aq_free},
    runtime::{
        AQ_DRIVER_SIM, AQ_SIM_UNCHECKED, AQ_STREAMS_RETIRED, aq_runtime, aq_runtime_create,
        aq_runtime_options,
    },
    sim::aq_sim_stream_create,
};
use std::{error::Error, ffi::c_void, hint::black_box, ptr::null_mut, time::Instant};

const ROUNDS: usize = 15;
const PAIRS: usize = 200_000;

struct Bench {
    pool: DevicePool,
    stream: Stream,
    runtime: aq_runtime,
    foreign: *mut c_void,
    /// One that keeps events, and a stream of its.
    recorded: (aq_runtime, *mut c_void),
}

#[derive(Clone, Copy)]
enum Row {
    Token,
    Turned,
    Address,
    Foreign,
    Default,
    Recorded,
}

const ROWS: [(Row, &str, &str); 6] = [
    (Row::Token, "token", "DevicePool::alloc, drop"),
    (Row::Turned, "turned", "DevicePool::alloc + into_raw, free_raw"),
    (Row::Address, "address", "DevicePool::alloc_raw, free_raw"),
    (Row::Foreign, "aq", "aq_alloc, aq_free on a registered stream"),
    (Row::Default, "default", "aq_alloc, aq_free on the default stream"),
    (Row::Recorded, "history", "aq_alloc, aq_free on a registered stream, with a history"),
];

/// A runtime on a device that checks nothing, which keeps so many events, and a registered stream
/// of it.
fn opened(history: u64) -> Result<(aq_runtime, *mut c_void), Box<dyn Error>> {
    let mut options =
        aq_runtime_options { size: size_of::<aq_runtime_options>(), ..Default::default() };
    options.driver = AQ_DRIVER_SIM;
    options.sim_flags = AQ_SIM_UNCHECKED;
    options.streams = AQ_STREAMS_RETIRED;
    options.history = history;
    let (mut runtime, mut foreign) = (0, null_mut());
    // SAFETY: 1. of this version, with its size. 2. a local.
    let made = unsafe { aq_runtime_create(&raw const options, &raw mut runtime) };
    // SAFETY: 1. a local.
    let made = made | unsafe { aq_sim_stream_create(runtime, 0, &raw mut foreign) };
    if made == 0 { Ok((runtime, foreign)) } else { Err("no runtime, or no stream".into()) }
}

impl Bench {
    fn new() -> Result<Self, Box<dyn Error>> {
        let sim = Sim::h200(1);
        sim.oracle(false);
        let driver = sim.driver();
        let runtime = Runtime::on(driver.clone())?;
        let pool = runtime.device(0)?.clone();
        let stream = pool.stream()?;
        let (runtime, foreign) = opened(0)?;
        Ok(Self { pool, stream, runtime, foreign, recorded: opened(10_000)? })
    }

    /// Of each call a status, which are or'd.
    fn through_c(runtime: aq_runtime, stream: *mut c_void, pairs: usize) -> i32 {
        let mut status = 0;
        for _ in 0..pairs {
            let mut address = 0;
            // SAFETY: 1. the simulated driver's, and never destroyed. 2. a local.
            status |= unsafe { aq_alloc(runtime, 0, black_box(4096), stream, &raw mut address) };
            status |= aq_free(runtime, 0, black_box(address));
        }
        status
    }

    #[inline(never)]
    fn measured(&self, row: Row, pairs: usize) -> Result<(), Box<dyn Error>> {
        match row {
            Row::Token => {
                for _ in 0..pairs {
                    drop(black_box(
                        self.pool.alloc(&self.stream, Request::bytes(black_box(4096)))?,
                    ));
                }
            }
            Row::Turned => {
                for _ in 0..pairs {
                    let block = self.pool.alloc(&self.stream, Request::bytes(black_box(4096)))?;
                    self.pool.free_raw(black_box(block.into_raw()))?;
                }
            }
            Row::Address => {
                for _ in 0..pairs {
                    let address =
                        self.pool.alloc_raw(&self.stream, Request::bytes(black_box(4096)))?;
                    self.pool.free_raw(black_box(address))?;
                }
            }
            Row::Foreign if Self::through_c(self.runtime, self.foreign, pairs) == 0 => {}
            Row::Default if Self::through_c(self.runtime, null_mut(), pairs) == 0 => {}
            Row::Recorded if Self::through_c(self.recorded.0, self.recorded.1, pairs) == 0 => {}
            _ => return Err("a call failed".into()),
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let bench = Bench::new()?;
    if let Some(at) = arguments.iter().position(|argument| argument == "--count") {
        let asked = arguments.get(at + 1).map_or("", String::as_str);
        let row = ROWS
            .iter()
            .find(|(_, name, _)| *name == asked)
            .ok_or("token, turned, address, aq, default or history")?;
        bench.measured(row.0, 100)?;
        bench.measured(row.0, 1000)?;
        return Ok(());
    }
    let mut rounds = vec![Vec::new(); ROWS.len()];
    for _ in 0..ROUNDS {
        for ((row, ..), times) in ROWS.iter().zip(&mut rounds) {
            let begun = Instant::now();
            bench.measured(*row, PAIRS)?;
            times.push(begun.elapsed().as_nanos() as f64 / PAIRS as f64);
        }
    }
    for ((.., name), times) in ROWS.iter().zip(&mut rounds) {
        times.sort_by(f64::total_cmp);
        println!("{:6.1} ns a pair  {name}", times[ROUNDS / 2]);
    }
    Ok(())
}
