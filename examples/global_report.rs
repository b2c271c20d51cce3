//! Memory of a program by tag, a cap on it, and a library's columns in pinned memory.
//!
//! `cargo run --release --example global_report -- FILE.csv` reads your own file with columns of
//! whole numbers, plain or compressed with xz. Without an argument it reads a trace of this
//! project. The columns are built by Arrow, which has no support for pinned memory. The same call
//! fills plain memory outside a route and pinned memory inside one, and both results are copied to
//! the device.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{Bytes, DeviceBuffer, Runtime, Stream, Tag, global, staging, tagged};
use arrow_array::{Array, Int64Array, builder::Int64Builder};
use std::{
    env,
    error::Error,
    ffi::OsString,
    fs::File,
    io::{BufReader, Read},
    path::Path,
    ptr::NonNull,
    time::{Duration, Instant},
};
use xz4rust::XzReader;

#[global_allocator]
static GLOBAL: aquifer::Global = aquifer::Global::new();

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// Rows per parsed batch, of which each column is one transfer to the device.
const ROWS: usize = 1 << 16;
/// Bytes of columns that are copied on a GPU, enough to be timed.
const ENOUGH: usize = 64 << 20;

fn open(path: &Path) -> Result<Box<dyn Read>> {
    let file = BufReader::new(File::open(path)?);
    let packed = path.extension().is_some_and(|extension| extension == "xz");
    Ok(if packed { Box::new(XzReader::new(file)) } else { Box::new(file) })
}

/// Parses the file into batches of columns, and counts its rows.
fn parse(path: &Path) -> Result<(Vec<Vec<Int64Array>>, usize)> {
    let mut reader = csv::Reader::from_reader(open(path)?);
    let mut columns: Vec<_> = reader.headers()?.iter().map(|_| Int64Builder::new()).collect();
    let (mut batches, mut rows) = (Vec::new(), 0);
    let mut record = csv::StringRecord::new();
    while reader.read_record(&mut record)? {
        for (column, field) in columns.iter_mut().zip(&record) {
            column.append_option(field.parse().ok());
        }
        rows += 1;
        if rows % ROWS == 0 {
            batches.push(columns.iter_mut().map(Int64Builder::finish).collect());
        }
    }
    batches.push(columns.iter_mut().map(Int64Builder::finish).collect());
    Ok((batches, rows))
}

/// Returns the columns of whole numbers without missing values.
fn numbers(batches: &[Vec<Int64Array>]) -> impl Iterator<Item = &[i64]> {
    let columns = batches.iter().flatten().filter(|column| column.null_count() == 0);
    columns.map(|column| &column.values()[..]).filter(|column| !column.is_empty())
}

/// Copies all columns to `x`, one after another. Returns the best of three times.
fn upload(s: &Stream, columns: &[&[i64]], x: &mut DeviceBuffer<i64>) -> Result<Duration> {
    let mut best = Duration::MAX;
    for _ in 0..3 {
        let mut rest = x.as_mut_slice();
        let begun = Instant::now();
        s.scope(|copies| -> Result<()> {
            for column in columns {
                let (mut part, behind) = rest.into_split(column.len())?;
                copies.upload(column, &mut part)?;
                rest = behind;
            }
            Ok(())
        })??;
        best = best.min(begun.elapsed());
    }
    Ok(best)
}

fn main() -> Result<()> {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama_train.csv.xz");
    let path = env::args_os().nth(1).unwrap_or_else(|| OsString::from(trace));
    let path = Path::new(&path);
    let rt = Runtime::builder().or_sim().build()?;
    let pool = rt.device(0)?;
    let s = pool.stream()?;
    staging::install(rt.pinned_near(0).clone())?;

    // The same call twice, each under its own tag, and the second one in a route.
    let (plain, routed) = (Tag::named("parsed"), Tag::named("parsed into pinned memory"));
    let (in_plain, _) = tagged(plain, || parse(path))?;
    let (in_pinned, rows) = tagged(routed, || staging::route(|| parse(path)))?;

    let (before, after): (Vec<_>, Vec<_>) =
        (numbers(&in_plain).collect(), numbers(&in_pinned).collect());
    let count: usize = after.iter().map(|column| column.len()).sum();
    println!("{rows} rows of {}, {} of whole numbers", path.display(), Bytes(count as u64 * 8));
    if count == 0 || before != after {
        return Err("no whole numbers, or not the same ones twice".into());
    }
    let pinned = after
        .iter()
        .filter(|c| rt.pinned_near(0).is_pinned(NonNull::from(**c).cast()) == Some(true));
    println!("{} of {} columns lie in pinned memory, without a copy", pinned.count(), after.len());

    // Copies both to the device, often enough to be timed.
    let simulated = rt.driver().is_none_or(|driver| driver.name() != "cuda");
    let times = if simulated { 1 } else { ENOUGH.div_ceil(count * 8) };
    let (before, after) = (before.repeat(times), after.repeat(times));
    let mut x: DeviceBuffer<i64> = pool.buffer(&s, count * times)?;
    let (slow, fast) = (upload(&s, &before, &mut x)?, upload(&s, &after, &mut x)?);
    let mut back = vec![0; count];
    s.try_scope(|c| c.download(x.slice(0..count)?, &mut back))?;
    if back != after.concat()[..count] {
        return Err("numbers were lost on the way".into());
    }
    let speed = |took: Duration| (count * times * 8) as f64 / took.as_secs_f64().max(1e-9) / 1e9;
    let whose = if simulated {
        "to a simulated device, whose figures say nothing of a GPU's"
    } else {
        "to the GPU"
    };
    println!(
        "{:.1} GB/s from where the route put them, {:.1} from plain memory, {whose}",
        speed(fast),
        speed(slow)
    );

    // A cap: an allocation beyond it fails, and the program continues.
    global::set_cap(global::stats().live + (1 << 20));
    let mut more = Vec::<u8>::new();
    if more.try_reserve_exact(16 << 20).is_ok() {
        return Err("a cap of 1 MiB more granted 16".into());
    }
    global::set_cap(u64::MAX);

    for tag in [plain, routed] {
        let bytes = Bytes(global::allocated_under(tag).bytes).to_string();
        println!("{bytes:>12} allocated as \"{tag}\"");
    }
    let stats = global::stats();
    println!(
        "{} live and {} at the peak, {} in pinned memory by a route; {} refused by the cap",
        Bytes(stats.live),
        Bytes(stats.peak),
        Bytes(stats.routed),
        stats.refusals
    );
    Ok(())
}
