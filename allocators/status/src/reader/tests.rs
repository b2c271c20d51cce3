//! Files of every kind of damage: each gives its error, and nothing is removed that is no dead
//! process's file.

use crate::{
    FileFault, PoolKind, StatusError, StatusFolder,
    layout::{
        FILE_BYTES, LINE_BYTES, LINES_AT, MAGIC, SLOT_BYTES, SLOTS, SLOTS_AT, VERSION, WORD,
        header, slot,
    },
};
use nix::unistd;
use std::{
    fs::{self, File, Permissions},
    io::Write,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process,
    time::Duration,
};

/// A folder that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("aquifer-status-{name}-{}", process::id()));
        let _absent = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
        Self(path)
    }

    fn folder(&self) -> StatusFolder {
        StatusFolder::at(&self.0).unwrap()
    }

    fn write(&self, name: &str, image: &Image) -> File {
        let mut file = File::create(self.0.join(name)).unwrap();
        file.write_all(&image.0).unwrap();
        file
    }

    /// Reads the only file.
    fn fault(&self) -> FileFault {
        let all: Vec<_> = self.folder().processes().unwrap().collect();
        match &all[..] {
            [Err(StatusError::BadFile { fault, .. })] => fault.clone(),
            other => panic!("{other:?}"),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _left = fs::remove_dir_all(&self.0);
    }
}

/// The place of the peak of requested bytes among the figures.
const REQUESTED_PEAK: usize = 6;

/// The bytes of a file.
#[derive(Clone)]
struct Image(Vec<u8>);

impl Image {
    /// A file with one pool of one cache.
    fn new() -> Self {
        let mut image = Self(vec![0; FILE_BYTES]);
        image.set(0, header::MAGIC, MAGIC);
        image.set(0, header::VERSION, VERSION);
        image.set(0, header::PROCESS, 77);
        image.set(0, header::SLOTS_USED, 2);
        image.set(0, header::LINES_USED, 1);
        let id = 5 << 32 | 1;
        for (at, word) in [(0, 8), (slot::ID, id), (slot::KIND, 1), (slot::DEVICE, 4)] {
            image.set(SLOTS_AT, at, word);
        }
        image.set(SLOTS_AT, slot::LIMIT, slot::NONE);
        image.set(SLOTS_AT, slot::LARGEST_FREE, 3);
        // Bytes that are cached or in blocks.
        image.set(SLOTS_AT, slot::STATS + 2, 4096);
        image.set(SLOTS_AT, slot::NAME, 3);
        image.set(SLOTS_AT, slot::NAME + 1, u64::from_ne_bytes(*b"gpu\0\0\0\0\0"));
        // Its part.
        image.set(SLOTS_AT + SLOT_BYTES, slot::ID, 6 << 32 | 2);
        image.set(SLOTS_AT + SLOT_BYTES, slot::PART_OF, id);
        image.set(SLOTS_AT + SLOT_BYTES, slot::KIND, 1);
        image.set(SLOTS_AT + SLOT_BYTES, slot::STATS, 100);
        // The requested peak: what the pool has published, and what its part has, of the pool.
        image.set(SLOTS_AT, slot::STATS + REQUESTED_PEAK, 950);
        image.set(SLOTS_AT + SLOT_BYTES, slot::STATS + REQUESTED_PEAK, 940);
        // Three blocks allocated, one of them freed, and one of them pending.
        for (at, word) in [id, 1536, 900, 3, 1, 512, 1].into_iter().enumerate() {
            image.set(LINES_AT, at, word);
        }
        image
    }

    fn set(&mut self, at: usize, word: usize, value: u64) {
        let at = at + word * WORD;
        self.0[at..at + WORD].copy_from_slice(&value.to_ne_bytes());
    }
}

#[test]
fn figures_of_a_pool_are_those_of_its_slot_its_parts_and_its_lines() {
    let scratch = Scratch::new("sums");
    let file = scratch.write("1.status", &Image::new());
    file.lock().unwrap();
    scratch.write("unrelated", &Image(vec![1; 10]));
    let all: Vec<_> = scratch.folder().processes().unwrap().map(Result::unwrap).collect();
    let [process] = &all[..] else { panic!("{all:?}") };
    assert!(process.is_alive() && process.process == 77 && process.faults.is_empty());
    let [pool] = &process.pools[..] else { panic!("{process:?}") };
    assert_eq!((pool.kind, &*pool.name), (PoolKind::Device, "gpu"));
    assert_eq!((pool.device, pool.node, pool.caches), (Some(3), None, 1));
    assert_eq!((pool.limit, pool.largest_free), (None, Some(3)));
    let stats = pool.stats;
    assert_eq!((stats.live, stats.requested), (1536 - 512 + 100, 900));
    assert_eq!((stats.cached, stats.pending), (4096 - 1536, 512));
    assert_eq!((stats.blocks, stats.allocations, stats.frees), (1, 3, 2));
    // The peak is raised to what is live now. That of a part is no addition.
    assert_eq!((stats.peak_live, stats.peak_requested), (1124, 950));
    assert_eq!(process.total(), stats);
}

#[test]
fn dead_processes_are_shown_and_swept_and_living_ones_stay() {
    let scratch = Scratch::new("sweep");
    let living = scratch.write("living.status", &Image::new());
    living.lock().unwrap();
    drop(scratch.write("dead.status", &Image::new()));
    scratch.write("foreign.status", &Image(vec![1; FILE_BYTES]));
    scratch.write("short.status", &Image(Vec::new()));
    let folder = scratch.folder();
    let alive = |folder: &StatusFolder| {
        let mut alive: Vec<_> =
            folder.processes().unwrap().flatten().map(|process| process.is_alive).collect();
        alive.sort_unstable();
        alive
    };
    assert_eq!(alive(&folder), [false, true]);
    assert_eq!(folder.sweep_older_than(Duration::from_secs(60)).unwrap(), 0);
    assert_eq!(folder.sweep().unwrap(), 1);
    assert_eq!(alive(&folder), [true]);
    assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 3);
    drop(living);
    assert_eq!(folder.sweep().unwrap(), 1);
}

#[test]
fn a_folder_is_read_up_to_a_bound_and_says_so() {
    let scratch = Scratch::new("many");
    for number in 0..4096 {
        fs::write(scratch.0.join(format!("{number}.status")), "").unwrap();
    }
    let read = || scratch.folder().processes().unwrap().collect::<Vec<_>>();
    let is_bound = |read: &Result<_, _>| matches!(read, Err(StatusError::TooManyEntries { .. }));
    let all = read();
    assert!(all.len() == 4096 && !all.iter().any(is_bound));
    fs::write(scratch.0.join("another"), "").unwrap();
    fs::write(scratch.0.join("more"), "").unwrap();
    let all = read();
    assert!(all.len() <= 4097 && all.last().is_some_and(is_bound));
}

#[test]
fn damaged_files_give_the_error_of_their_damage() {
    let valid = Image::new();
    let with = |word: usize, value: u64| {
        let mut image = valid.clone();
        image.set(0, word, value);
        image
    };
    let (most, expected) = (SLOTS as u64, FILE_BYTES as u64);
    let cases = [
        (Image(Vec::new()), FileFault::WrongMagic),
        (Image(vec![0; FILE_BYTES]), FileFault::WrongMagic),
        (with(header::MAGIC, MAGIC ^ 1), FileFault::WrongMagic),
        (with(header::VERSION, 2), FileFault::OtherVersion { found: 2, known: VERSION }),
        (Image(valid.0[..4096].to_vec()), FileFault::Truncated { bytes: 4096, expected }),
        (
            with(header::SLOTS_USED, u64::MAX),
            FileFault::BadCount { name: "slots", found: u64::MAX, most },
        ),
        (
            with(header::LINES_USED, 1025),
            FileFault::BadCount { name: "lines", found: 1025, most: 1024 },
        ),
    ];
    for (number, (image, fault)) in cases.into_iter().enumerate() {
        let scratch = Scratch::new(&format!("damage-{number}"));
        scratch.write("1.status", &image);
        assert_eq!(scratch.fault(), fault);
        // What cannot be read is not swept either, unless it is of our magic and whole.
        let swept = scratch.folder().sweep().unwrap();
        let whole = image.0.len() == FILE_BYTES && image.0.starts_with(&MAGIC.to_ne_bytes());
        assert_eq!(swept, usize::from(whole));
    }
}

#[test]
fn a_slot_that_its_writer_left_half_written_is_a_fault_and_hides_no_other_pool() {
    let scratch = Scratch::new("torn");
    let mut image = Image::new();
    image.set(SLOTS_AT + SLOT_BYTES, 0, 3);
    for locked in [true, false] {
        let file = scratch.write("1.status", &image);
        if locked {
            file.lock().unwrap();
        }
        let process = scratch.folder().processes().unwrap().next().unwrap().unwrap();
        assert_eq!(process.faults, [FileFault::Torn { slot: 1 }]);
        assert_eq!((process.pools.len(), process.pools[0].stats.live), (1, 1024));
    }
}

#[test]
fn files_of_random_bytes_never_crash_the_reader() {
    let scratch = Scratch::new("random");
    let mut state = 1_u64;
    let mut next = move || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        state >> 11
    };
    for _ in 0..200 {
        let mut image = Image::new();
        image.set(0, header::SLOTS_USED, next() % 257);
        image.set(0, header::LINES_USED, next() % 1025);
        for _ in 0..400 {
            let at = 8 * 3 + next() as usize % (FILE_BYTES - 8 * 3);
            if !(header::SLOTS_USED * WORD..(header::LINES_USED + 1) * WORD).contains(&at) {
                image.0[at] = next() as u8;
            }
            let line = LINES_AT + next() as usize % 1024 * LINE_BYTES;
            image.set(line, 0, 5 << 32 | 1);
            image.set(line, 1 + next() as usize % 9, next() << 20);
        }
        scratch.write("1.status", &image);
        let process = scratch.folder().processes().unwrap().next().unwrap().unwrap();
        assert!(process.pools.len() <= SLOTS);
        let _total = process.total();
    }
}

#[test]
fn links_pipes_and_folders_are_not_followed() {
    let scratch = Scratch::new("links");
    let target = scratch.0.join("target");
    fs::write(&target, &Image::new().0).unwrap();
    let path = scratch.0.join("1.status");
    symlink(&target, &path).unwrap();
    assert_eq!(scratch.fault(), FileFault::NotRegular);
    assert_eq!(scratch.folder().sweep().unwrap(), 0);
    fs::remove_file(&path).unwrap();
    unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR).unwrap();
    assert_eq!(scratch.fault(), FileFault::NotRegular);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(scratch.fault(), FileFault::NotRegular);
    assert!(target.exists());
}

#[test]
fn folders_and_files_of_others_are_refused() {
    let reason = |path: &Path| match StatusFolder::at(path) {
        Err(StatusError::UnsafeFolder { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    let scratch = Scratch::new("others");
    fs::set_permissions(&scratch.0, Permissions::from_mode(0o750)).unwrap();
    assert!(reason(&scratch.0).contains("0700"));
    fs::set_permissions(&scratch.0, Permissions::from_mode(0o700)).unwrap();
    let link = std::env::temp_dir().join(format!("aquifer-status-link-{}", process::id()));
    symlink(&scratch.0, &link).unwrap();
    let of_link = reason(&link);
    fs::remove_file(&link).unwrap();
    assert_eq!(of_link, "it is no folder");
    // Absent folders have no processes.
    let absent = StatusFolder::at(scratch.0.join("absent")).unwrap();
    assert_eq!((absent.processes().unwrap().count(), absent.sweep().unwrap()), (0, 0));
    if !unistd::geteuid().is_root() {
        println!("skipped: only root can give files to another user");
        return;
    }
    drop(scratch.write("1.status", &Image::new()));
    let other = Some(unistd::Uid::from_raw(12345));
    unistd::chown(&scratch.0.join("1.status"), other, None).unwrap();
    assert_eq!(scratch.fault(), FileFault::OtherOwner { owner: 12345 });
    assert_eq!(scratch.folder().sweep().unwrap(), 0);
    unistd::chown(&scratch.0, other, None).unwrap();
    assert_eq!(reason(&scratch.0), "another user owns it");
    unistd::chown(&scratch.0, Some(unistd::geteuid()), None).unwrap();
}
