//! `aquifer bench stage`: copies of pageable memory and files to the device and back, compared with
//! the driver's own copy and the pinned limit.
//!
//! | rows | peer |
//! |---|---|
//! | `upload 1 GiB`, `download 1 GiB` | the driver's copy of pageable memory |
//! | `…, of the limit` | the driver's copy of pinned memory |
//! | `…, CPU` | the processor time of the driver's copy |
//! | `both ways 1 GiB` | both ways with pinned memory |
//! | `file 1 GiB, warm` and so on | the file read into memory, then the driver's copy of it |
//!
//! Host memory is touched once before anything is timed. On the simulated device copies move no
//! bytes. There the rows are times of the calls, and no rates.

use crate::console::{foreign, place::Place, progress::ProgressLine};
use crate::{
    bed::{Bed, Took, timed},
    host,
    lap::{Pace, repeat},
    report::{BenchReport, Failure, LeftOut},
    row::{Row, Unit, size},
    settings::{RowSelection, StageOptions},
    sheet::{BenchError, Sheet},
};
use aquifer_core::{Bytes, MemoryError, Result};
use aquifer_host::{FileSource, ReadMode, Source};
use nix::sys::statvfs::statvfs;
use std::{
    env, fs,
    io::{self, Write},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    process,
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The alignment of memory for direct reads, in bytes.
const PAGE: usize = 4096;

/// Sizes of transfers, in bytes.
const SIZES: [u64; 13] = [
    4 * KIB,
    16 * KIB,
    64 * KIB,
    128 * KIB,
    256 * KIB,
    512 * KIB,
    MIB,
    4 * MIB,
    16 * MIB,
    64 * MIB,
    256 * MIB,
    GIB,
    8 * GIB,
];
/// The size from which processor time is reported. The clock is too coarse for smaller ones.
const LONG: u64 = 64 * MIB;
/// Sizes of files, in bytes.
const FILES: [u64; 7] = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB, 8 * GIB];

const PAGEABLE: &str = "driver, pageable memory";
const PINNED: &str = "pinned memory, the limit";
const READ_FIRST: &str = "read, then the driver's copy";

/// Names that a pattern may be meant for, if no row's name contains it.
const EXAMPLES: [&str; 4] =
    ["upload 1 MiB", "download 1 MiB, of the limit", "both ways 64 MiB", "file 16 MiB, warm"];

/// A transfer of some bytes that is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TransferGroup {
    Upload(u64),
    Download(u64),
    Both(u64),
    Warm(u64),
    Cold(u64),
    Direct(u64),
}

impl TransferGroup {
    fn bytes(self) -> u64 {
        match self {
            Self::Upload(bytes)
            | Self::Download(bytes)
            | Self::Both(bytes)
            | Self::Warm(bytes)
            | Self::Cold(bytes)
            | Self::Direct(bytes) => bytes,
        }
    }

    fn name(self) -> String {
        let bytes = size(self.bytes());
        match self {
            Self::Upload(_) => format!("upload {bytes}"),
            Self::Download(_) => format!("download {bytes}"),
            Self::Both(_) => format!("both ways {bytes}"),
            Self::Warm(_) => format!("file {bytes}, warm"),
            Self::Cold(_) => format!("file {bytes}, cold"),
            Self::Direct(_) => format!("file {bytes}, O_DIRECT"),
        }
    }

    /// Returns the names of all rows it may have.
    fn names(self) -> [String; 3] {
        let name = self.name();
        [name.clone(), limit(&name), processor(&name)]
    }
}

fn limit(name: &str) -> String {
    format!("{name}, of the limit")
}

fn processor(name: &str) -> String {
    format!("{name}, CPU")
}

/// Measures the selected rows. Takes some minutes.
///
/// # Errors
/// [`BenchError`], before anything is measured.
pub(crate) fn run(options: &StageOptions, rows: &RowSelection) -> Result<BenchReport, BenchError> {
    let place = Place::choose(options.device).map_err(BenchError::Place)?;
    let simulated = matches!(place, Place::Sim(_));
    let usual = match (simulated, rows.quick) {
        (true, _) => MIB,
        (false, true) => 64 * MIB,
        (false, false) => 8 * GIB,
    };
    let most = options.most.unwrap_or(usual).max(SIZES[0]);
    let groups = groups(most);
    let sheet = Sheet::new(rows.only.as_deref());
    let wants = |group: &TransferGroup| group.names().iter().any(|name| sheet.wants(name));
    let wanted: Vec<_> = groups.into_iter().filter(wants).collect();
    if wanted.is_empty() {
        return Err(BenchError::NoRow {
            pattern: rows.only.as_deref().unwrap_or_default().to_lowercase(),
            names: EXAMPLES.map(str::to_owned).into(),
        });
    }
    let mut progress = ProgressLine::on_terminal();
    progress.phase("opening the device, and making slots ready");
    let session = place.begin();
    let bed = Bed::open(&session, options.stager.clone()).map_err(BenchError::Device)?;
    let mut bench = StageBench {
        bed: &bed,
        pace: Pace::of(rows.quick),
        folder: options.folder.clone().unwrap_or_else(env::temp_dir),
        up: Vec::new(),
        down: Vec::new(),
        sheet,
        simulated,
    };
    progress.phase("measuring:");
    for (done, group) in wanted.iter().enumerate() {
        progress.at(done as u64, wanted.len() as u64);
        bench.measure(*group);
    }
    progress.clear();
    let mut sheet = bench.sheet;
    if simulated {
        let why = "simulated: copies move no bytes, so these are the times of the calls".to_owned();
        sheet.left_out.push(LeftOut { row: "rates".to_owned(), why });
    }
    sheet.rows.sort_by_key(place_on_page);
    sheet.report("stage", &place, rows.quick)
}

/// Returns the groups of transfers up to `most` bytes.
fn groups(most: u64) -> Vec<TransferGroup> {
    let sizes = || SIZES.into_iter().filter(|&size| size <= most);
    let largest = sizes().next_back().unwrap_or(SIZES[0]);
    // If no transfer is that long, the longest one.
    let long = || sizes().filter(|&size| size >= LONG.min(largest));
    let files = FILES.into_iter().filter(|&size| size <= most);
    let mut groups: Vec<_> = sizes()
        .flat_map(|size| [TransferGroup::Upload(size), TransferGroup::Download(size)])
        .collect();
    groups.extend(long().map(TransferGroup::Both));
    groups.extend(files.flat_map(|size| {
        [TransferGroup::Warm(size), TransferGroup::Cold(size), TransferGroup::Direct(size)]
    }));
    groups
}

/// Orders rows so that those with the same peer are adjacent.
fn place_on_page(row: &Row) -> u32 {
    match (row.unit, row.peer.as_ref().map(|peer| peer.name.as_str())) {
        (Unit::GbPerSecond | Unit::Us, Some(PAGEABLE)) => 0,
        (Unit::GbPerSecond | Unit::Us, Some(READ_FIRST)) => 1,
        (Unit::GbPerSecond | Unit::Us, _) => 2,
        _ => 3,
    }
}

struct StageBench<'a> {
    bed: &'a Bed,
    pace: Pace,
    folder: PathBuf,
    /// Pageable memory that has been touched, as long as the longest transfer so far.
    up: Vec<u8>,
    down: Vec<u8>,
    sheet: Sheet,
    /// No bytes move: only times of calls are reported, no rates.
    simulated: bool,
}

impl StageBench<'_> {
    fn measure(&mut self, group: TransferGroup) {
        let bytes = group.bytes();
        let file = matches!(
            group,
            TransferGroup::Warm(_) | TransferGroup::Cold(_) | TransferGroup::Direct(_)
        );
        let buffers = if matches!(group, TransferGroup::Both(_)) { 2 } else { 1 };
        let more = 2 * bytes.saturating_sub(self.up.len() as u64) + u64::from(file) * bytes;
        if buffers * bytes > self.bed.room() {
            return self
                .leave_out(group, format!("needs {} of device memory", Bytes(buffers * bytes)));
        }
        if more > host::available().unwrap_or(u64::MAX) / 4 * 3 {
            return self.leave_out(group, format!("needs {} of host memory", Bytes(more)));
        }
        if file && room_in(&self.folder).is_some_and(|room| bytes > room / 4 * 3) {
            return self.leave_out(
                group,
                format!("needs {} in {}", Bytes(bytes), foreign::path(&self.folder)),
            );
        }
        let bytes = bytes as usize;
        if self.up.len() < bytes {
            // Newly allocated and touched.
            (self.up, self.down) = (vec![1; bytes], vec![2; bytes + PAGE]);
        }
        let measured = match group {
            TransferGroup::Upload(_) => self.one_way(group, true),
            TransferGroup::Download(_) => self.one_way(group, false),
            TransferGroup::Both(_) => self.both(group),
            TransferGroup::Warm(_) | TransferGroup::Cold(_) | TransferGroup::Direct(_) => {
                self.file(group)
            }
        };
        if let Err(error) = measured {
            self.sheet.failures.push(Failure {
                row: group.name(),
                count: 1,
                said: error.to_string(),
            });
        }
    }

    fn leave_out(&mut self, group: TransferGroup, why: String) {
        self.sheet.left_out.push(LeftOut { row: group.name(), why });
    }

    fn speed(&mut self, name: String, took: f64, bytes: u64, peer: (&str, f64)) {
        // Nanoseconds per 10⁹ bytes.
        if self.simulated {
            self.sheet.add(&name, Unit::Us, took, Some((peer.0, peer.1)));
            return;
        }
        let scale = 1e9 / bytes as f64;
        self.sheet.add(&name, Unit::GbPerSecond, took * scale, Some((peer.0, peer.1 * scale)));
    }

    fn cpu(&mut self, name: &str, took: f64, bytes: u64, peer: (&str, f64)) {
        if bytes >= LONG && !self.simulated {
            let scale = GIB as f64 / bytes as f64;
            let peer = Some((peer.0, peer.1 * scale));
            self.sheet.add(&processor(name), Unit::CpuPerGib, took * scale, peer);
        }
    }

    fn one_way(&mut self, group: TransferGroup, up: bool) -> Result<()> {
        let (bed, bytes) = (self.bed, group.bytes());
        let mut device = bed.buffer(bytes)?;
        let mut pinned = bed.limit(bytes)?;
        let (host_up, host_down) = (&self.up[..bytes as usize], &mut self.down[..bytes as usize]);
        let [staged, staged_cpu, driver, driver_cpu, limit_] = repeat(self.pace, || {
            let (staged, driver, limit) = if up {
                (
                    bed.upload(host_up, &mut device)?,
                    bed.driver_upload(host_up, &mut device)?,
                    bed.driver_upload(&pinned, &mut device)?,
                )
            } else {
                (
                    bed.download(&device, host_down)?,
                    bed.driver_download(&device, host_down)?,
                    bed.driver_download(&device, &mut pinned)?,
                )
            };
            Ok::<_, MemoryError>([staged.wall, staged.cpu, driver.wall, driver.cpu, limit.wall])
        })?;
        let name = group.name();
        self.speed(name.clone(), staged, bytes, (PAGEABLE, driver));
        self.speed(limit(&name), staged, bytes, (PINNED, limit_));
        self.cpu(&name, staged_cpu, bytes, (PAGEABLE, driver_cpu));
        Ok(())
    }

    fn both(&mut self, group: TransferGroup) -> Result<()> {
        let (bed, bytes) = (self.bed, group.bytes());
        let (mut x, y) = (bed.buffer(bytes)?, bed.buffer(bytes)?);
        let (pinned_up, mut pinned_down) = (bed.limit(bytes)?, bed.limit(bytes)?);
        let (up, down) = (&self.up[..bytes as usize], &mut self.down[..bytes as usize]);
        let [staged, cpu, limit] = repeat(self.pace, || {
            let staged = bed.both((up, &mut x), (&y, down))?;
            let limit = bed.driver_both((&pinned_up, &mut x), (&y, &mut pinned_down))?;
            Ok::<_, MemoryError>([staged.wall, staged.cpu, limit.wall])
        })?;
        let name = group.name();
        // Both directions together move twice the bytes.
        self.speed(name.clone(), staged, 2 * bytes, (PINNED, limit));
        if bytes >= LONG && !self.simulated {
            let ns = cpu * GIB as f64 / (2 * bytes) as f64;
            self.sheet.add(&processor(&name), Unit::CpuPerGib, ns, None);
        }
        Ok(())
    }

    fn file(&mut self, group: TransferGroup) -> Result<()> {
        let (bed, bytes) = (self.bed, group.bytes());
        let refused = |error: io::Error| MemoryError::BadSetting {
            name: "--folder",
            value: error.to_string(),
            expected: "a folder that files can be written to and read from",
        };
        let written = Written::new(&self.folder, &self.up[..bytes as usize]).map_err(refused)?;
        let mode = if matches!(group, TransferGroup::Direct(_)) {
            ReadMode::Direct
        } else {
            ReadMode::Cached
        };
        let source = FileSource::open(&written.path, mode).map_err(refused)?;
        let cached = FileSource::open(&written.path, ReadMode::Cached).map_err(refused)?;
        // Writes dirty pages back, which would otherwise disturb the timing, and drops the page
        // cache.
        cached.drop_cache().map_err(refused)?;
        let cold = matches!(group, TransferGroup::Cold(_));
        let mut device = bed.buffer(bytes)?;
        let pinned = bed.limit(bytes)?;
        // Unaligned reads would go through the page cache.
        let page = self.down.as_ptr().align_offset(PAGE);
        let host = &mut self.down[page..][..bytes as usize];
        let [staged, staged_cpu, driver, driver_cpu, limit_] = repeat(self.pace, || {
            let forget = || if cold { cached.drop_cache().map_err(refused) } else { Ok(()) };
            forget()?;
            let staged = bed.read(&source, 0, &mut device)?;
            forget()?;
            let read = timed(|| read_all(&source, host).map_err(refused))?;
            let copied = bed.driver_upload(host, &mut device)?;
            let driver = Took { wall: read.wall + copied.wall, cpu: read.cpu + copied.cpu };
            let limit = bed.driver_upload(&pinned, &mut device)?;
            Ok::<_, MemoryError>([staged.wall, staged.cpu, driver.wall, driver.cpu, limit.wall])
        })?;
        if source.mode() != mode {
            self.leave_out(group, "the file system refuses direct reads".to_owned());
            return Ok(());
        }
        let name = group.name();
        self.speed(name.clone(), staged, bytes, (READ_FIRST, driver));
        self.speed(limit(&name), staged, bytes, (PINNED, limit_));
        self.cpu(&name, staged_cpu, bytes, (READ_FIRST, driver_cpu));
        Ok(())
    }
}

/// Returns the free bytes of a folder's file system, or `None` if it does not report them.
fn room_in(folder: &Path) -> Option<u64> {
    let found = statvfs(folder).ok()?;
    Some(found.blocks_available() * found.fragment_size())
}

fn read_all(source: &FileSource, mut into: &mut [u8]) -> io::Result<()> {
    let mut offset = 0;
    while !into.is_empty() {
        match source.read_at(offset, into)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => {
                offset += read as u64;
                into = &mut into[read..];
            }
        }
    }
    Ok(())
}

/// A file without a name, which is freed when it is closed.
struct Written {
    /// A path through which it can be opened again.
    path: PathBuf,
    _file: fs::File,
}

impl Written {
    fn new(folder: &Path, bytes: &[u8]) -> io::Result<Self> {
        let name = folder.join(format!("aquifer-bench-stage-{}", process::id()));
        let mut file = fs::File::create_new(&name)?;
        // Unlinked, so that it is removed when the process ends for any reason.
        fs::remove_file(&name)?;
        file.write_all(bytes)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        Ok(Self { path, _file: file })
    }
}
