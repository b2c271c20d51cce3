//! Programs over a ledger whose file another process overwrites, checked against a model.
//!
//! Members join, claim, release and leave; some join and claim inside of another's claim, before
//! any of its stores. Now and then words or bytes of the file become noise. Nothing panics then,
//! whatever is read. Once each member has written its slot anew, claims are granted exactly as in
//! the model again.
#![expect(clippy::expect_used, reason = "a broken promise is told by a panic")]

use crate::program::{Bytes, Process, Program};
use aquifer_status::ledger::{Ledger, LedgerError, Member, Share, steps::run_inside};
use std::{
    cell::RefCell,
    env, fs,
    fs::{File, OpenOptions},
    os::unix::fs::FileExt,
    path::PathBuf,
    process,
    rc::Rc,
    sync::atomic::{AtomicU64, Ordering},
};

const CAPACITY: u64 = 1000;
const MAX_MEMBERS: usize = 6;

/// A folder that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self(env::temp_dir().join(format!("aquifer-fuzz-ledger-{}-{number}", process::id())))
    }

    fn open(&self) -> Result<Ledger, LedgerError> {
        Ledger::open(&self.0, "gpu", CAPACITY)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _left = fs::remove_dir_all(&self.0);
    }
}

/// A member, and what the model says of it.
struct Modelled {
    member: Member,
    claimed: u64,
    reserved: u64,
    limit: u64,
}

pub(crate) struct World {
    scratch: Scratch,
    file: File,
    len: u64,
    members: Vec<Modelled>,
    /// The file has been overwritten since all members have repaired it.
    noisy: bool,
    /// The magic and the version of the file.
    head: [u8; 16],
    /// They are others now, so that no ledger can be opened.
    is_damaged: bool,
}

/// Returns the bytes by which a file is known as a ledger of this version.
fn head(file: &File) -> [u8; 16] {
    let mut head = [0; 16];
    file.read_exact_at(&mut head, 0).expect("the file is open");
    head
}

impl Program for World {
    const PROCESS: Process = Process::Any;

    fn open(_: &mut Bytes<'_>) -> Option<Self> {
        let scratch = Scratch::new();
        let path = scratch.open().expect("a new folder").path().to_owned();
        let file = OpenOptions::new().write(true).read(true).open(path).expect("it was created");
        let len = file.metadata().expect("the file is open").len();
        let (head, members) = (head(&file), Vec::new());
        Some(Self { scratch, file, len, members, noisy: false, head, is_damaged: false })
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.choice(16) {
            0 | 1 => self.join(bytes),
            2 if !self.members.is_empty() => {
                let number = self.one(bytes);
                drop(self.members.swap_remove(number));
            }
            3 => self.overwrite(bytes),
            4 | 5 => self.repair(),
            6..=10 => self.claim(bytes),
            11 => self.join_inside_of_a_claim(bytes),
            12..=14 => self.release(bytes),
            _ => self.read(),
        }
    }

    fn check(&mut self) {}

    fn finish(self) {}
}

impl World {
    /// Returns the number of one of the members.
    fn one(&self, bytes: &mut Bytes<'_>) -> usize {
        usize::from(bytes.u8()) % self.members.len()
    }

    fn join(&mut self, bytes: &mut Bytes<'_>) {
        if self.members.len() == MAX_MEMBERS {
            return;
        }
        let (guarantee, limit) = (u64::from(bytes.u8()), 100 + 4 * u64::from(bytes.u8()));
        let reserve = bytes.choice(2) == 0;
        let share = Share::new().guarantee(guarantee).limit(limit).priority(i32::from(bytes.u8()));
        let share = if reserve { share.reserve() } else { share };
        let joined = self.scratch.open().and_then(|ledger| share.join(ledger));
        assert!(!self.is_damaged || joined.is_err(), "a damaged file has been joined");
        let Ok(member) = joined else { return };
        let reserved = if reserve { guarantee } else { 0 };
        // A first member, or one that has read noise, may have another capacity than the model.
        let limit = limit.min(member.limit());
        self.members.push(Modelled { member, claimed: 0, reserved, limit });
        if self.noisy {
            self.members.pop();
        }
    }

    fn overwrite(&mut self, bytes: &mut Bytes<'_>) {
        self.noisy = true;
        for _ in 0..=bytes.choice(8) {
            // Mostly the first lines of the header and of the first slots, which matter most.
            let at = match bytes.choice(4) {
                0 => u64::from(bytes.u8()) * 8,
                1 => 4096 + u64::from(bytes.u8()) * 8,
                _ => 4096 + 256 * u64::from(bytes.u8() % 8) + u64::from(bytes.u8() % 8) * 8,
            };
            let noise = match bytes.choice(4) {
                0 => u64::MAX,
                1 => 0,
                2 => u64::from(bytes.u8()),
                _ => u64::from(bytes.u16()) << bytes.choice(56),
            };
            self.file.write_all_at(&noise.to_ne_bytes(), at).expect("the file is open");
        }
        // Noise may be the very number that was there.
        self.is_damaged = head(&self.file) != self.head;
        self.read();
    }

    fn repair(&mut self) {
        for modelled in &self.members {
            modelled.member.refresh();
        }
        if let Some(first) = self.members.first() {
            // Others' use is lowered while claims stand still.
            (0..2).for_each(|_| _ = first.member.measure(|| Some(0)));
            self.noisy = false;
        }
        self.read();
    }

    fn claim(&mut self, bytes: &mut Bytes<'_>) {
        if self.members.is_empty() {
            return;
        }
        let (own, wanted) = (self.one(bytes), u64::from(bytes.u16() % 600));
        let others = self.members.iter().enumerate().filter(|(number, _)| *number != own);
        let held: u64 = others.map(|(_, other)| other.claimed.max(other.reserved)).sum();
        let modelled = &mut self.members[own];
        let next = modelled.claimed + wanted;
        let fits = wanted == 0 || (next <= modelled.limit && held + next <= CAPACITY);
        let granted = modelled.member.claim(wanted);
        if !self.noisy {
            assert_eq!(granted.is_ok(), fits, "{wanted} beside {} and {held}", modelled.claimed);
        }
        match granted {
            Ok(()) => modelled.claimed = next,
            Err(refused) => {
                assert_eq!((refused.requested, refused.claimed), (wanted, modelled.claimed));
                assert!(self.noisy || refused.room() < wanted);
            }
        }
    }

    /// A member joins and claims before a store of another one's claim. Of the two claims at least
    /// one is granted if either fits, and never both if they do not fit together.
    fn join_inside_of_a_claim(&mut self, bytes: &mut Bytes<'_>) {
        if self.members.is_empty() || self.members.len() == MAX_MEMBERS || self.noisy {
            return;
        }
        let (own, stores) = (self.one(bytes), u64::from(bytes.choice(5)));
        let (wanted, inner) = (1 + u64::from(bytes.u16() % 600), 1 + u64::from(bytes.u16() % 600));
        let held = self.members.iter().map(|other| other.claimed.max(other.reserved)).sum::<u64>();
        let Ok(ledger) = self.scratch.open() else { return };
        let joined = Rc::new(RefCell::new(None));
        let join = {
            let joined = joined.clone();
            move || {
                let member = Share::new().join(ledger).expect("a slot is free");
                let granted = member.claim(inner).is_ok();
                *joined.borrow_mut() = Some((member, granted));
            }
        };
        let modelled = &mut self.members[own];
        let beside = held - modelled.claimed.max(modelled.reserved);
        let next = modelled.claimed + wanted;
        let granted = run_inside(stores, Box::new(join), || modelled.member.claim(wanted)).is_ok();
        let fits_alone = next <= modelled.limit && beside + next <= CAPACITY;
        modelled.claimed = if granted { next } else { modelled.claimed };
        let Some((member, inner_granted)) = joined.take() else {
            assert_eq!(granted, fits_alone, "{wanted} with {} and {beside}", modelled.claimed);
            return;
        };
        let held = beside + modelled.claimed.max(modelled.reserved);
        let all = self.members.iter().map(|other| other.claimed).sum::<u64>();
        let claimed = if inner_granted { inner } else { 0 };
        // What was claimed while the file was noise may exceed it.
        let any = granted || inner_granted;
        assert!(!any || all + claimed <= CAPACITY, "{all} and {claimed} are granted");
        assert!(granted || !fits_alone || held + claimed + wanted > CAPACITY, "none is granted");
        let limit = member.limit();
        self.members.push(Modelled { member, claimed, reserved: 0, limit });
    }

    fn release(&mut self, bytes: &mut Bytes<'_>) {
        if self.members.is_empty() {
            return;
        }
        let own = self.one(bytes);
        let modelled = &mut self.members[own];
        let rest = modelled.claimed.saturating_sub(u64::from(bytes.u16() % 700));
        modelled.member.release(modelled.claimed - rest);
        modelled.claimed = rest;
    }

    fn read(&self) {
        for modelled in &self.members {
            let member = &modelled.member;
            assert_eq!(member.claimed(), modelled.claimed);
            let (owed, _room) = (member.owed(), member.room());
            assert!(owed <= CAPACITY || self.noisy);
        }
        match Ledger::existing(&self.scratch.0, "gpu") {
            Ok(ledger) => {
                let shown = ledger.figures();
                if !self.noisy {
                    let claimed: u64 = self.members.iter().map(|member| member.claimed).sum();
                    assert_eq!(shown.claimed(), claimed);
                }
            }
            Err(error) => assert!(self.is_damaged, "{error}"),
        }
        let len = self.file.metadata().expect("the file is open").len();
        assert_eq!(len, self.len, "the file has another size");
    }
}
