//! Loads a checkpoint of `safetensors` shards onto all devices. Each device gets its rows or
//! columns of every matrix.
//!
//! `cargo run --release --example load_safetensors -- FOLDER` loads the shards in a folder. Without
//! an argument a small checkpoint is created and loaded. Without a GPU two simulated ones are used.
//! Every byte is read back and compared.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it does")]

use aquifer::{
    DeviceBuffer, FileSource, Runtime, Stager, StagerConfig,
    sim::Sim,
    staging::{ReadMode, Source, Staged},
};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    env,
    error::Error,
    fs,
    io::{self, IsTerminal, Read, Write},
    iter,
    ops::Range,
    path::{Path, PathBuf},
    process,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

/// A tensor in a shard, described as rows.
struct Tensor {
    name: String,
    shard: usize,
    offset: u64,
    rows: u64,
    row_bytes: u64,
    element: u64,
}

/// The part of a tensor for one device: ranges of the shard, stored one after another.
struct Part {
    shard: usize,
    ranges: Vec<Range<u64>>,
    bytes: u64,
}

impl Tensor {
    /// Returns the part for device `which` of `of`: rows, or columns for the last matrix of a
    /// layer, as in tensor parallelism.
    fn part(&self, which: u64, of: u64) -> Part {
        let share = |n: u64| n * which / of..n * (which + 1) / of;
        let row = |row| self.offset + row * self.row_bytes;
        let by_columns = self.name.ends_with("down.weight");
        let ranges: Vec<_> = if by_columns {
            let columns = share(self.row_bytes / self.element);
            let (from, to) = (columns.start * self.element, columns.end * self.element);
            (0..self.rows).map(|at| row(at) + from..row(at) + to).collect()
        } else {
            let rows = share(self.rows);
            iter::once(row(rows.start)..row(rows.end)).collect()
        };
        let bytes = ranges.iter().map(|range| range.end - range.start).sum();
        Part { shard: self.shard, ranges, bytes }
    }
}

/// Reads the header of a shard: its length in eight bytes, then JSON, then the tensors.
fn header(path: &Path, shard: usize) -> Result<Vec<Tensor>> {
    let mut file = fs::File::open(path)?;
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    let bytes = file.metadata()?.len();
    let refused = |what: String| format!("{}: {what}", path.display());
    // Lengths, offsets and shapes come from the file, so no sum or product may overflow.
    let data = length.checked_add(8).filter(|&data| data <= bytes);
    let data =
        data.ok_or_else(|| refused(format!("a header of {length} bytes in a file of {bytes}")))?;
    let mut text = vec![0; length as usize];
    file.read_exact(&mut text)?;
    let entries: BTreeMap<String, Value> = serde_json::from_slice(&text)?;
    let tensors =
        entries.into_iter().filter(|(name, _)| name != "__metadata__").map(|(name, entry)| {
            let number = |value: &Value| {
                value.as_u64().ok_or_else(|| format!("{name}: {entry} is no tensor"))
            };
            let (from, to) =
                (number(&entry["data_offsets"][0])?, number(&entry["data_offsets"][1])?);
            let shape = entry["shape"]
                .as_array()
                .into_iter()
                .flatten()
                .map(number)
                .collect::<Result<Vec<_>, _>>()?;
            let held = to.saturating_sub(from);
            let end = data.checked_add(to).filter(|&end| from <= to && end <= bytes);
            end.ok_or_else(|| {
                refused(format!("{name}: bytes {from} to {to} are not in the file"))
            })?;
            // An element has a byte at least, so that no count exceeds the size of the file.
            let elements = shape.iter().try_fold(1u64, |all, &n| all.checked_mul(n));
            let elements = elements.filter(|&n| n <= held && (n == 0) == (held == 0));
            let elements = elements
                .ok_or_else(|| refused(format!("{name}: {shape:?} elements in {held} bytes")))?;
            let rows = shape.first().copied().unwrap_or(1).min(elements);
            let (row_bytes, element) = (held / rows.max(1), held / elements.max(1));
            Ok(Tensor {
                name,
                shard,
                offset: data + from,
                rows,
                row_bytes,
                element: element.max(1),
            })
        });
    tensors.collect()
}

/// Writes two shards with a few layers. All numbers differ.
fn make_checkpoint(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    for shard in 0..2u32 {
        let (mut entries, mut data) = (BTreeMap::new(), Vec::new());
        for layer in 0..3 {
            for (name, shape) in
                [("up.weight", [512, 256]), ("down.weight", [256, 512]), ("norm.weight", [257, 1])]
            {
                let begin = data.len();
                let count: u32 = shape.iter().product();
                data.extend(
                    (0..count).flat_map(|at| {
                        (at as f32 * 0.5 + (shard * 3 + layer) as f32).to_le_bytes()
                    }),
                );
                let entry =
                    json!({ "dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()] });
                entries.insert(format!("layers.{}.{name}", shard * 3 + layer), entry);
            }
        }
        let header = serde_json::to_string(&entries)?;
        let mut file =
            fs::File::create(folder.join(format!("model-{:05}-of-00002.safetensors", shard + 1)))?;
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        file.write_all(&data)?;
    }
    Ok(())
}

/// Displays the progress of all transfers until `over` is set.
fn progress_bar(staged: &Mutex<Vec<Staged>>, total: u64, over: &AtomicBool) {
    while io::stderr().is_terminal() && !over.load(Ordering::Relaxed) {
        let done: u64 = staged
            .lock()
            .map(|all| all.iter().map(|one| one.progress().done).sum())
            .unwrap_or_default();
        let filled = (done * 40 / total.max(1)) as usize;
        eprint!(
            "\r[{:<40}] {:>5.1} %",
            "#".repeat(filled),
            100.0 * done as f64 / total.max(1) as f64
        );
        thread::sleep(Duration::from_millis(50));
    }
    if io::stderr().is_terminal() {
        eprint!("\r\x1b[K");
    }
}

/// Loads all parts of one device into newly allocated memory.
fn load(
    stager: &Stager,
    shards: &[FileSource],
    parts: &[Part],
    to: &mut [DeviceBuffer<u8>],
    seen: &Mutex<Vec<Staged>>,
) -> Result<()> {
    stager.scope(|s| -> Result<()> {
        for (part, to) in parts.iter().zip(to) {
            let staged = s.read_ranges(&shards[part.shard], part.ranges.iter().cloned(), to)?;
            seen.lock().map_err(|_| "the bar is broken")?.push(staged);
        }
        Ok(())
    })?
}

/// Appends a range of a file to `to`.
fn read_whole(file: &FileSource, range: &Range<u64>, to: &mut Vec<u8>) -> Result<()> {
    let (mut at, begin) = (range.start, to.len());
    to.resize(begin + (range.end - range.start) as usize, 0);
    while at < range.end {
        match file.read_at(at, &mut to[begin + (at - range.start) as usize..])? {
            0 => return Err("the file has become shorter".into()),
            read => at += read as u64,
        }
    }
    Ok(())
}

fn gigabytes(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / took.as_secs_f64().max(1e-9) / 1e9
}

fn main() -> Result<()> {
    let made = env::temp_dir().join(format!("aquifer-checkpoint-{}", process::id()));
    let folder = match env::args_os().nth(1) {
        Some(folder) => PathBuf::from(folder),
        None => {
            make_checkpoint(&made)?;
            made.clone()
        }
    };
    let loaded = run(&folder);
    if folder == made {
        fs::remove_dir_all(&made)?;
    }
    loaded
}

fn run(folder: &Path) -> Result<()> {
    let mut paths: Vec<_> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    paths.sort();
    let shards = paths
        .iter()
        .map(|path| FileSource::open(path, ReadMode::Cached))
        .collect::<io::Result<Vec<_>>>()?;
    let mut tensors = Vec::new();
    for (shard, path) in paths.iter().enumerate() {
        tensors.extend(header(path, shard)?);
    }

    let rt = Runtime::builder().build()?;
    let rt = if rt.devices().is_empty() { Runtime::on(Sim::h200(2).driver())? } else { rt };
    let devices = rt.devices().len();
    let parts: Vec<Vec<_>> = (0..devices)
        .map(|d| {
            tensors
                .iter()
                .map(|t| t.part(d as u64, devices as u64))
                .filter(|p| p.bytes > 0)
                .collect()
        })
        .collect();
    let total: u64 = parts.iter().flatten().map(|part| part.bytes).sum();
    println!(
        "{} tensors in {} shards, {total} bytes, for {devices} devices",
        tensors.len(),
        shards.len()
    );

    let mut held = Vec::new();
    let mut stagers = Vec::new();
    for (device, parts) in parts.iter().enumerate() {
        let (pool, stager) = (rt.device(device)?, rt.stager(device, StagerConfig::default())?);
        let s = pool.stream()?;
        stager.warm()?;
        held.push(
            parts
                .iter()
                .map(|part| Ok(pool.buffer(&s, part.bytes as usize)?))
                .collect::<Result<Vec<DeviceBuffer<u8>>>>()?,
        );
        stagers.push((stager, s));
    }

    // One thread per device, with a progress bar.
    let (seen, over, begun) = (Mutex::new(Vec::new()), AtomicBool::new(false), Instant::now());
    let took = thread::scope(|threads| -> Result<Duration> {
        threads.spawn(|| progress_bar(&seen, total, &over));
        let loads: Vec<_> = stagers
            .iter()
            .zip(&parts)
            .zip(&mut held)
            .map(|(((stager, _), parts), to)| {
                let (shards, seen) = (&shards, &seen);
                threads.spawn(move || load(stager, shards, parts, to, seen))
            })
            .collect();
        let outcomes: Vec<_> = loads
            .into_iter()
            .map(|load| load.join().unwrap_or_else(|_| Err("a load panicked".into())))
            .collect();
        let took = begun.elapsed();
        over.store(true, Ordering::Relaxed);
        outcomes.into_iter().collect::<Result<()>>()?;
        Ok(took)
    })?;

    // Compares every byte with the files, and times the driver's own copy of the same bytes from
    // memory.
    let mut copied = Duration::ZERO;
    for (((stager, s), parts), buffers) in stagers.iter().zip(&parts).zip(&mut held) {
        for (part, x) in parts.iter().zip(buffers) {
            let mut bytes = vec![0; part.bytes as usize];
            stager.try_scope(|stage| stage.download(x, &mut bytes).map(drop))?;
            let mut expected = Vec::with_capacity(bytes.len());
            for range in &part.ranges {
                read_whole(&shards[part.shard], range, &mut expected)?;
            }
            if bytes != expected {
                return Err("bytes were lost on the way".into());
            }
            let begun = Instant::now();
            s.try_scope(|c| c.upload(&expected, x))?;
            copied += begun.elapsed();
        }
    }
    println!(
        "every byte is right; {:.2} GB/s from the files, {:.2} GB/s by the driver's own copy from memory",
        gigabytes(total, took),
        gigabytes(total, copied)
    );
    Ok(())
}
