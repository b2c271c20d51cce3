//! Members within one process, and files that are no ledgers.

use crate::ledger::{
    Ledger, LedgerError, Member, Share,
    layout::{FILE_BYTES, MAGIC, SLOT_WORDS, VERSION, WORD, header, slot},
    protocol::{
        LAPSES_AFTER_NS,
        tests::{DIE_AT, STOP_AT},
    },
    steps::run_inside,
    system::LockRange,
};
use crate::{FileFault, StatusError};
use nix::{
    libc,
    sys::{
        signal::{SigHandler, Signal, kill, signal},
        stat::Mode,
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{self, Pid},
};
use std::{
    env, fs,
    os::unix::{
        fs::{FileExt, symlink},
        process::ExitStatusExt,
    },
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
    sync::{
        Barrier,
        atomic::Ordering::{Acquire, Relaxed},
        mpsc,
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

/// A folder that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("aquifer-ledger-{name}-{}", process::id()));
        let _absent = fs::remove_dir_all(&path);
        Self(path)
    }

    fn ledger(&self, capacity: u64) -> Ledger {
        Ledger::open(&self.0, "gpu", capacity).unwrap()
    }

    fn join(&self, share: Share) -> Member {
        share.join(self.ledger(100)).unwrap()
    }

    fn path(&self) -> PathBuf {
        self.0.join("gpu.ledger")
    }

    fn fault(&self) -> FileFault {
        match Ledger::open(&self.0, "gpu", 100) {
            Err(LedgerError::File(StatusError::BadFile { fault, .. })) => fault,
            other => panic!("{other:?}"),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _left = fs::remove_dir_all(&self.0);
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(3)
}

#[test]
fn a_claim_of_no_bytes_is_granted_where_others_hold_more_than_the_capacity() {
    let scratch = Scratch::new("none");
    let (borrower, other) = (scratch.join(Share::new()), scratch.join(Share::new()));
    borrower.claim(100).unwrap();
    let _reserved = scratch.join(Share::new().guarantee(40).reserve());
    other.claim(0).unwrap();
    assert_eq!(other.claim(1).unwrap_err().room(), 0);
    assert_eq!(other.claimed(), 0);
}

#[test]
fn members_share_one_capacity_and_leave_with_their_claims() {
    let scratch = Scratch::new("share");
    let (first, second) = (scratch.join(Share::new()), scratch.join(Share::new().limit(50)));
    first.claim(70).unwrap();
    let refused = second.claim(40).unwrap_err();
    assert_eq!((refused.room(), refused.others, refused.is_final()), (30, 70, false));
    assert!(second.claim(60).unwrap_err().is_final());
    second.claim(30).unwrap();
    assert_eq!((first.room(), second.room(), second.claimed()), (0, 0, 30));
    drop(first);
    assert_eq!(second.room(), 20);
    second.release(u64::MAX);
    assert_eq!((second.claimed(), second.ledger().figures().claimed()), (0, 0));
}

#[test]
fn the_first_member_sets_the_capacity_and_a_lower_one_limits_its_own_member() {
    let scratch = Scratch::new("capacity");
    drop(Share::new().join(scratch.ledger(500)).unwrap());
    let first = scratch.join(Share::new());
    let lower = Share::new().join(scratch.ledger(40)).unwrap();
    let higher = Share::new().join(scratch.ledger(400)).unwrap();
    assert_eq!((first.limit(), lower.limit(), higher.limit()), (100, 40, 100));
    assert!(matches!(Ledger::open(&scratch.0, "gpu", 0), Err(LedgerError::NoCapacity)));
}

#[test]
fn guarantees_are_checked_when_a_member_joins() {
    let scratch = Scratch::new("guarantees");
    let _first = scratch.join(Share::new().guarantee(60));
    let too_much = Share::new().guarantee(41).join(scratch.ledger(100));
    assert!(matches!(
        too_much,
        Err(LedgerError::GuaranteesExceedCapacity { guarantee: 41, others: 60, capacity: 100 })
    ));
    let above = Share::new().guarantee(50).limit(40).join(scratch.ledger(100));
    assert!(matches!(above, Err(LedgerError::GuaranteeAboveLimit { guarantee: 50, limit: 40 })));
    let _second = scratch.join(Share::new().guarantee(40));
}

#[test]
fn a_guarantee_is_lent_and_a_reserved_one_is_not() {
    let scratch = Scratch::new("lent");
    let lender = scratch.join(Share::new().guarantee(60));
    let borrower = scratch.join(Share::new());
    borrower.claim(95).unwrap();
    // On the lender's need the borrower owes what is missing, and keeps nothing of its excess.
    assert!(lender.claim_by(60, soon()).is_err());
    thread::scope(|scope| {
        let waiting = scope.spawn(|| lender.claim_by(60, Instant::now() + Duration::from_secs(20)));
        while borrower.owed() != 55 {
            thread::yield_now();
        }
        borrower.release(borrower.owed());
        // What was given back is not claimed again before the lender has it.
        assert!(borrower.claim(55).is_err());
        waiting.join().unwrap().unwrap();
    });
    assert_eq!((lender.claimed(), borrower.claimed()), (60, 40));
    drop((lender, borrower));
    let _reserving = scratch.join(Share::new().guarantee(60).reserve());
    let other = scratch.join(Share::new());
    assert!(other.claim(41).is_err());
    other.claim(40).unwrap();
}

#[test]
fn a_member_never_owes_what_is_guaranteed_to_it() {
    let scratch = Scratch::new("owes");
    let holder = scratch.join(Share::new().guarantee(50));
    let other = scratch.join(Share::new().priority(9));
    holder.claim(70).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| other.claim_by(90, Instant::now() + Duration::from_secs(20)));
        while holder.owed() != 20 {
            thread::yield_now();
        }
        holder.release(20);
        assert_eq!((holder.owed(), waiting.is_finished()), (0, false));
        holder.release(50);
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn members_that_can_give_back_are_asked_before_others_for_a_while() {
    let scratch = Scratch::new("order");
    let idle = scratch.join(Share::new().priority(-1));
    let busy = scratch.join(Share::new());
    let other = scratch.join(Share::new());
    idle.claim(50).unwrap();
    busy.claim(50).unwrap();
    idle.set_reclaimable(30);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| other.claim_by(40, Instant::now() + Duration::from_secs(20)));
        let mut first = None;
        while first.is_none_or(|owed| owed < 40) {
            let owed = busy.owed();
            if owed > 0 && first.is_none() {
                assert!(owed == 10 || owed == 40, "{owed}");
            }
            first = (owed > 0).then_some(owed).or(first);
            assert!(!waiting.is_finished(), "the wish has ended first");
        }
        assert_eq!(idle.owed(), 40);
        busy.release(40);
        waiting.join().unwrap().unwrap();
    });
}

/// The bound of the crate's documentation: released bytes are kept for the first wish, whatever
/// others try meanwhile.
#[test]
fn a_waiting_member_is_passed_by_no_later_claim_of_its_rank() {
    const ROUNDS: u32 = 200;
    let scratch = Scratch::new("starvation");
    let (first, second) = (scratch.join(Share::new()), scratch.join(Share::new()));
    let waiting = scratch.join(Share::new());
    for _ in 0..ROUNDS {
        first.claim(50).unwrap();
        second.claim(50).unwrap();
        thread::scope(|scope| {
            let wish = scope.spawn(|| {
                waiting.claim_by(100, Instant::now() + Duration::from_secs(20)).unwrap();
                waiting.release(100);
            });
            while first.ledger().figures().members.iter().all(|member| member.wanted == 0) {
                thread::yield_now();
            }
            // The wish needs all, so that none of it is granted again before.
            first.release(50);
            assert!(first.claim(50).is_err() && second.claim(1).is_err());
            second.release(50);
            wish.join().unwrap();
        });
    }
}

#[test]
fn higher_priorities_and_earlier_wishes_are_served_first() {
    let scratch = Scratch::new("ranks");
    let holder = scratch.join(Share::new());
    let members = [
        scratch.join(Share::new()),
        scratch.join(Share::new()),
        scratch.join(Share::new().priority(5)),
    ];
    holder.claim(100).unwrap();
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        for (number, member) in members.iter().enumerate() {
            let sender = sender.clone();
            scope.spawn(move || {
                member.claim_by(100, Instant::now() + Duration::from_secs(20)).unwrap();
                sender.send(number).unwrap();
                member.release(100);
            });
            while holder.ledger().figures().members.iter().filter(|m| m.wanted > 0).count()
                <= number
            {
                thread::yield_now();
            }
        }
        holder.release(100);
    });
    drop(sender);
    assert_eq!(receiver.iter().collect::<Vec<_>>(), [2, 0, 1]);
}

#[test]
fn a_wish_that_is_not_renewed_stops_keeping_bytes() {
    let scratch = Scratch::new("lapse");
    let (stopped, other) = (scratch.join(Share::new().priority(1)), scratch.join(Share::new()));
    let words = stopped.ledger().table().slot(0);
    words[slot::RANK].store(u64::MAX, Relaxed);
    words[slot::RENEWED].store(crate::ledger::system::now_ns(), Relaxed);
    words[slot::WANTED].store(100, Relaxed);
    assert_eq!(other.claim(50).unwrap_err().kept, 100);
    thread::sleep(Duration::from_nanos(LAPSES_AFTER_NS));
    other.claim(50).unwrap();
    stopped.refresh();
    assert_eq!(words[slot::WANTED].load(Relaxed), 0);
}

#[test]
fn use_by_others_is_subtracted_from_the_capacity() {
    let scratch = Scratch::new("unaccounted");
    let member = scratch.join(Share::new());
    member.claim(20).unwrap();
    member.measure(|| Some(55));
    assert_eq!((member.room(), member.ledger().figures().unaccounted), (45, 35));
    member.measure(|| None);
    assert_eq!(member.claim(46).unwrap_err().unaccounted, 35);
    // What has been claimed and not been taken yet hides as much.
    member.measure(|| Some(10));
    member.claim(80).unwrap();
}

#[test]
fn what_is_claimed_but_not_taken_yet_does_not_hide_others_use() {
    let scratch = Scratch::new("hidden");
    let member = scratch.join(Share::new());
    member.measure(|| Some(55));
    member.claim(20).unwrap();
    member.measure(|| Some(55));
    assert_eq!(member.ledger().figures().unaccounted, 55);
    member.claim(26).unwrap_err();
    // Claims stand still, so what others use has indeed become less.
    member.measure(|| Some(55));
    assert_eq!(member.ledger().figures().unaccounted, 35);
}

#[test]
fn what_moves_from_one_member_to_another_while_the_use_is_read_is_not_others_use() {
    let scratch = Scratch::new("moves");
    let (first, second) = (scratch.join(Share::new()), scratch.join(Share::new()));
    first.claim(60).unwrap();
    first.measure(|| {
        // Read while both use theirs, and a third has joined.
        second.claim(20).unwrap();
        let third = scratch.join(Share::new());
        third.claim(20).unwrap();
        first.release(60);
        drop(third);
        Some(80)
    });
    assert_eq!(first.ledger().figures().unaccounted, 0);
}

/// At each store of the claim, another member joins and claims what does not fit beside it.
#[test]
fn a_member_that_joins_inside_of_a_claim_is_seen_by_it_or_sees_it() {
    for stores in 0..6 {
        let scratch = Scratch::new("inside");
        let first = scratch.join(Share::new());
        let (sender, receiver) = mpsc::channel();
        let path = scratch.0.clone();
        let join = move || {
            let joined = Share::new().join(Ledger::open(&path, "gpu", 100).unwrap()).unwrap();
            let granted = joined.claim(60).is_ok();
            sender.send((joined, granted)).unwrap();
        };
        let own = run_inside(stores, Box::new(join), || first.claim(60)).is_ok();
        let Ok((_joined, granted)) = receiver.try_recv() else {
            assert!(own && stores > 3, "only {stores} stores");
            return;
        };
        assert!(!(own && granted), "both are granted at store {stores}");
        assert!(own || granted, "none is granted at store {stores}");
        assert!(first.ledger().figures().claimed() <= 100);
    }
}

#[test]
fn of_two_members_that_join_at_once_with_guarantees_above_the_capacity_one_is_refused() {
    for _ in 0..200 {
        let scratch = Scratch::new("at_once");
        let ledgers = [scratch.ledger(100), scratch.ledger(100)];
        let both = Barrier::new(2);
        let joined = thread::scope(|scope| {
            let join = |ledger| {
                both.wait();
                Share::new().guarantee(60).join(ledger)
            };
            let threads = ledgers.map(|ledger| scope.spawn(move || join(ledger)));
            threads.map(|thread| thread.join().unwrap())
        });
        assert_eq!(joined.iter().filter(|joined| joined.is_ok()).count(), 1, "{joined:?}");
    }
}

/// It neither answers nor uses what it has claimed.
#[test]
fn a_member_that_claims_all_and_never_uses_it_delays_others_no_longer_than_their_deadline() {
    let scratch = Scratch::new("hoarder");
    let (hoarder, other) = (scratch.join(Share::new()), scratch.join(Share::new().guarantee(60)));
    hoarder.claim(100).unwrap();
    let begun = Instant::now();
    let refused = other.claim_by(60, begun + Duration::from_millis(30)).unwrap_err();
    assert!((30..5000).contains(&begun.elapsed().as_millis()));
    assert_eq!((refused.others, refused.room(), refused.is_final()), (100, 0, false));
    assert_eq!(hoarder.claimed(), 100, "nothing is taken by force");
    // The ledger shows its claim, which ends with it.
    assert_eq!(other.ledger().figures().members[0].claimed, 100);
    drop(hoarder);
    other.claim(60).unwrap();
}

#[test]
fn noise_in_a_slot_is_repaired_by_its_owner() {
    let scratch = Scratch::new("noise");
    let (owner, other) = (scratch.join(Share::new().guarantee(10)), scratch.join(Share::new()));
    owner.claim(30).unwrap();
    for noise in [u64::MAX, 1, 0x5555_5555_5555_5555] {
        let table = owner.ledger().table();
        table.slot(0)[..SLOT_WORDS].iter().for_each(|word| word.store(noise, Relaxed));
        table.header[header::SLOTS_USED].store(noise, Relaxed);
        table.header[header::CAPACITY].store(noise, Relaxed);
        let _any = (other.claim(1).map(|()| other.release(1)), other.owed(), other.room());
        let _shown = other.ledger().figures();
        owner.refresh();
        assert_eq!((other.claim(71).is_err(), other.claim(70).is_ok()), (true, true), "{noise}");
        other.release(70);
        let shown = &other.ledger().figures().members[0];
        assert_eq!((shown.claimed, shown.guarantee, shown.limit), (30, 10, 100));
    }
}

#[test]
fn noise_in_slots_of_no_member_is_cleared_before_a_claim_is_refused() {
    let scratch = Scratch::new("dead");
    let member = scratch.join(Share::new());
    let table = member.ledger().table();
    table.header[header::SLOTS_USED].store(7, Relaxed);
    for number in [1, 3, 6] {
        table.slot(number).iter().for_each(|word| word.store(u64::MAX / 3, Relaxed));
    }
    member.claim(100).unwrap();
    assert_eq!(member.ledger().figures().members.len(), 1);
}

#[test]
fn all_slots_can_be_taken_and_one_more_is_refused() {
    let scratch = Scratch::new("full");
    let all: Vec<Member> = (0..256).map(|_| scratch.join(Share::new())).collect();
    let refused = Share::new().join(scratch.ledger(100));
    assert!(matches!(refused, Err(LedgerError::Full { slots: 256 })));
    all[255].claim(100).unwrap();
    drop(all);
    scratch.join(Share::new()).claim(100).unwrap();
}

#[test]
fn files_that_are_no_ledgers_give_the_error_of_their_damage() {
    let scratch = Scratch::new("files");
    drop(scratch.ledger(100));
    let path = scratch.path();
    let valid = fs::read(&path).unwrap();
    let with = |at: usize, value: u64| {
        let mut bytes = valid.clone();
        bytes[at * WORD..(at + 1) * WORD].copy_from_slice(&value.to_ne_bytes());
        bytes
    };
    let expected = FILE_BYTES as u64;
    let longer = [valid.clone(), vec![0; 1]].concat();
    for (bytes, fault) in [
        (Vec::new(), FileFault::WrongMagic),
        (vec![1; FILE_BYTES], FileFault::WrongMagic),
        (with(header::MAGIC, MAGIC ^ 1), FileFault::WrongMagic),
        (with(header::VERSION, 1), FileFault::OtherVersion { found: 1, known: VERSION }),
        (valid[..4096].to_vec(), FileFault::Truncated { bytes: 4096, expected }),
        (longer, FileFault::Truncated { bytes: expected + 1, expected }),
    ] {
        fs::write(&path, &bytes).unwrap();
        assert_eq!(scratch.fault(), fault);
        assert_eq!(fs::read(&path).unwrap(), bytes, "a file that is refused stays as it is");
    }
}

#[test]
fn links_pipes_folders_and_files_of_others_are_refused() {
    let scratch = Scratch::new("links");
    drop(scratch.ledger(100));
    let path = scratch.path();
    let target = scratch.0.join("target");
    fs::rename(&path, &target).unwrap();
    symlink(&target, &path).unwrap();
    assert_eq!(scratch.fault(), FileFault::NotRegular);
    fs::remove_file(&path).unwrap();
    unistd::mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    assert_eq!(scratch.fault(), FileFault::NotRegular);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(scratch.fault(), FileFault::NotRegular);
    fs::remove_dir(&path).unwrap();
    for name in ["", "a/b", "..ä"] {
        let opened = Ledger::open(&scratch.0, name, 100);
        assert!(matches!(opened, Err(LedgerError::BadName { .. })), "{name}");
    }
    if !unistd::geteuid().is_root() {
        println!("skipped: only root can give files to another user");
        return;
    }
    drop(scratch.ledger(100));
    unistd::chown(&path, Some(unistd::Uid::from_raw(12345)), None).unwrap();
    assert_eq!(scratch.fault(), FileFault::OtherOwner { owner: 12345 });
}

#[test]
fn names_are_those_of_the_ledgers_of_the_folder() {
    let scratch = Scratch::new("names");
    assert!(Ledger::names(&scratch.0).unwrap().is_empty());
    drop((scratch.ledger(100), Ledger::open(&scratch.0, "GPU-2_b.c", 5).unwrap()));
    fs::write(scratch.0.join("other"), "").unwrap();
    assert_eq!(Ledger::names(&scratch.0).unwrap(), ["GPU-2_b.c", "gpu"]);
    assert!(matches!(
        Ledger::existing(&scratch.0, "absent"),
        Err(LedgerError::File(StatusError::System { .. }))
    ));
}

/// Runs a test of this program in a process of its own, with a variable.
fn child(test: &str, variable: &str, value: &str, folder: &Path) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--include-ignored"]);
    command.env(variable, value).env("AQUIFER_TEST_FOLDER", folder);
    command
}

fn folder_of_child() -> PathBuf {
    env::var_os("AQUIFER_TEST_FOLDER").unwrap().into()
}

#[test]
fn a_full_disk_is_an_error_and_leaves_no_file() {
    let scratch = Scratch::new("disk");
    // To a pipe: the limit of the child's files holds for its output as well.
    let ended =
        child("ledger::tests::child_without_room", "AQUIFER_TEST", "1", &scratch.0).output();
    let ended = ended.unwrap();
    assert!(ended.status.success(), "{ended:?}");
    assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 0);
}

#[test]
#[ignore = "a child of the test above"]
#[expect(unsafe_code, reason = "ignores a signal, and limits the size of files")]
fn child_without_room() {
    // As a full disk: the system refuses the blocks.
    let limit = libc::rlimit { rlim_cur: 1024, rlim_max: 1024 };
    // SAFETY: 1. The limit is valid for the call. 2. No handler runs for an ignored signal.
    unsafe {
        libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit);
        signal(Signal::SIGXFSZ, SigHandler::SigIgn).unwrap();
    }
    let refused = Ledger::open(&folder_of_child(), "gpu", 100);
    assert!(matches!(refused, Err(LedgerError::File(StatusError::System { .. }))), "{refused:?}");
}

#[test]
fn a_process_that_is_killed_before_any_of_its_stores_leaves_no_claim() {
    let scratch = Scratch::new("stores");
    let survivor = scratch.join(Share::new());
    for at in 0.. {
        let ended =
            child("ledger::tests::child_that_dies", DIE_AT, &at.to_string(), &scratch.0).output();
        let ended = ended.unwrap();
        // Claims need no more than one attempt, whatever the dead process has left.
        survivor.claim(100).unwrap();
        survivor.release(100);
        assert_eq!(survivor.ledger().figures().members.len(), 1);
        if ended.status.success() {
            assert!(at > 30, "only {at} stores");
            return;
        }
        assert_eq!(ended.status.signal(), Some(libc::SIGKILL), "{ended:?}");
    }
}

#[test]
#[ignore = "a child of the test above"]
fn child_that_dies() {
    let share = Share::new().guarantee(20).reserve();
    let member = share.join(Ledger::open(&folder_of_child(), "gpu", 100).unwrap()).unwrap();
    member.claim(30).unwrap();
    member.claim(20).unwrap();
    member.release(10);
    assert!(member.claim(61).is_err());
    let other = Share::new().join(Ledger::open(&folder_of_child(), "gpu", 100).unwrap()).unwrap();
    other.claim(60).unwrap();
    assert!(member.claim_by(10, soon()).is_err());
    other.release(60);
    member.claim_by(60, soon()).unwrap();
    member.release(100);
    member.refresh();
}

/// Runs until it has stopped, or ended if that is sooner.
fn stopped(command: &mut Command) -> Option<process::Child> {
    let started = command.stdout(Stdio::null()).spawn().unwrap();
    match waitpid(Pid::from_raw(started.id() as i32), Some(WaitPidFlag::WUNTRACED)).unwrap() {
        WaitStatus::Stopped(..) => Some(started),
        WaitStatus::Exited(_, 0) => None,
        other => panic!("{other:?}"),
    }
}

/// What it holds stays. What it does not is free, also if a dead member has held it, and stays so
/// when the process goes on. What it holds is free once it is dead.
#[test]
fn a_process_that_is_stopped_before_any_of_its_stores_delays_others_by_at_most_100_ms() {
    let scratch = Scratch::new("stops");
    let survivor = scratch.join(Share::new());
    let words = survivor.ledger().table();
    for at in 0.. {
        let mut child =
            child("ledger::tests::child_that_stops", STOP_AT, &at.to_string(), &scratch.0);
        let Some(mut child) = stopped(&mut child) else {
            assert!(at > 60, "only {at} stores");
            return;
        };
        words.raise_used(8);
        words.slot(7)[slot::CLAIMED].store(25, Relaxed);
        let shown = survivor.ledger().figures();
        let held = shown.claimed();
        let begun = Instant::now();
        let granted = survivor.claim_by(100 - held, begun + Duration::from_secs(10));
        // More than 100 ms, for a machine that has other work.
        assert!(
            granted.is_ok() && begun.elapsed().as_millis() < 500,
            "{at}: {:?}",
            begun.elapsed()
        );
        if held > 0 {
            let refused = survivor.claim(1).unwrap_err();
            let largest = refused.largest.clone().unwrap();
            assert_eq!((refused.others, largest.process), (held, child.id()), "{at}");
        }
        let process = Pid::from_raw(child.id() as i32);
        if at % 2 == 0 {
            kill(process, Signal::SIGCONT).unwrap();
            assert!(child.wait().unwrap().success(), "{at}: it was granted what another holds");
        } else {
            kill(process, Signal::SIGKILL).unwrap();
            child.wait().unwrap();
        }
        survivor.claim(held).unwrap();
        survivor.release(100);
    }
}

#[test]
#[ignore = "a child of the test above"]
fn child_that_stops() {
    let member = Share::new().guarantee(20).priority(1);
    let member = member.join(Ledger::open(&folder_of_child(), "gpu", 100).unwrap()).unwrap();
    let granted = |claimed: Result<(), _>| {
        assert!(claimed.is_err() || member.ledger().figures().claimed() <= 100);
    };
    granted(member.claim(30));
    granted(member.claim(20));
    member.release(10);
    granted(member.claim(61));
    let other = Share::new().join(Ledger::open(&folder_of_child(), "gpu", 100).unwrap()).unwrap();
    granted(other.claim(60));
    granted(member.claim_by(10, soon()));
    other.release(60);
    granted(member.claim_by(60, soon()));
    member.refresh();
    other.measure(|| Some(0));
    drop(other);
    member.release(100);
}

#[test]
fn the_error_of_a_join_names_the_process_that_has_the_right_to_join() {
    let scratch = Scratch::new("busy");
    let holder = scratch.ledger(100);
    let _membership = holder.try_membership().unwrap().unwrap();
    let refused = Share::new().join(scratch.ledger(100)).unwrap_err();
    assert!(
        matches!(refused, LedgerError::Busy { process, .. } if process == process::id()),
        "{refused}"
    );
}

#[test]
fn a_refusal_names_the_largest_holder_and_tells_what_is_held_from_what_is_kept() {
    let scratch = Scratch::new("names");
    let (large, small) = (scratch.join(Share::new()), scratch.join(Share::new()));
    large.claim(50).unwrap();
    small.claim(20).unwrap();
    let words = large.ledger().table().slot(0);
    put_text(words, "evil\u{1b}[31m\ncommand");
    let other = scratch.join(Share::new());
    let refused = other.claim(31).unwrap_err();
    assert_eq!((refused.others, refused.kept, refused.reserved), (70, 0, 0));
    let own = process::id();
    let text = refused.to_string();
    let largest =
        format!("other processes hold 70 B; process {own} holds 50 B (\"evil\\u{{1b}}[31m");
    assert!(text.contains(&largest) && !text.contains(char::is_control), "{text}");
}

fn put_text(words: &[std::sync::atomic::AtomicU64], text: &str) {
    crate::text::write_text(words, slot::COMMAND, text);
}

#[test]
fn the_clock_of_wishes_is_one_that_no_namespace_shifts() {
    let system = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let shifted = crate::ledger::system::now_ns().abs_diff(system.as_nanos() as u64);
    assert!(shifted < 10_000_000_000, "{shifted} ns from the real-time clock");
}

#[test]
fn a_wish_is_seen_from_another_time_namespace() {
    let scratch = Scratch::new("namespaces");
    let holder = scratch.join(Share::new());
    holder.claim(100).unwrap();
    // A shift of ten days.
    let shifted = ["--time", "--monotonic", "864000"];
    let permitted = |user: &[&str]| {
        let mut tried = Command::new("unshare");
        tried.args(user).args(shifted).arg("true").stderr(Stdio::null());
        tried.status().is_ok_and(|status| status.success())
    };
    let ways: [&[&str]; 2] = [&[], &["--user", "--map-root-user"]];
    let Some(user) = ways.into_iter().find(|user| permitted(user)) else {
        println!("skipped: no time namespace can be made here");
        return;
    };
    let waits = child("ledger::tests::child_that_waits", "AQUIFER_TEST", "1", &scratch.0);
    let mut command = Command::new("unshare");
    command.args(user).args(shifted).arg(waits.get_program()).args(waits.get_args());
    command.envs(waits.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut waits = command.stdout(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    while holder.owed() < 40 {
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", holder.ledger().figures());
        assert!(waits.try_wait().unwrap().is_none(), "the wish has ended first");
        thread::yield_now();
    }
    holder.release(40);
    // What is released is kept for the wish.
    let passed = holder.claim(40);
    assert!(waits.wait().unwrap().success());
    assert!(passed.is_err());
}

#[test]
#[ignore = "a child of the test above"]
fn child_that_waits() {
    let member = Share::new().join(Ledger::open(&folder_of_child(), "gpu", 100).unwrap()).unwrap();
    member.claim_by(40, Instant::now() + Duration::from_secs(30)).unwrap();
}

#[test]
fn a_ledger_that_was_opened_before_a_fork_is_joined_in_the_child_as_any_other() {
    let scratch = Scratch::new("opened");
    let survivor = scratch.join(Share::new());
    survivor.claim(50).unwrap();
    let mut ended =
        child("ledger::tests::child_that_joins_after_a_fork", "AQUIFER_TEST", "1", &scratch.0);
    let ended = ended.output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    assert_eq!(survivor.ledger().figures().claimed(), 50);
}

#[test]
#[ignore = "a child of the test above"]
#[expect(unsafe_code, reason = "forks")]
fn child_that_joins_after_a_fork() {
    let folder = folder_of_child();
    let unrelated = folder.join("unrelated");
    fs::write(&unrelated, [0; FILE_BYTES]).unwrap();
    let (shown, joined) =
        (Ledger::existing(&folder, "gpu").unwrap(), Ledger::existing(&folder, "gpu").unwrap());
    // SAFETY: 1. No other thread of this process runs, as far as the child depends on it.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let open = || fs::OpenOptions::new().read(true).write(true).open(&unrelated).unwrap();
        // They have the numbers of the ledgers' descriptors now.
        let reused: Vec<fs::File> = (0..16).map(|_| open()).collect();
        let figures = shown.figures();
        let mut well = figures.members.len() == 1 && figures.claimed() == 50;
        let member = Share::new().join(joined).unwrap();
        well &= member.claim(60).is_err() && member.claim(50).is_ok();
        well &= member.ledger().figures().claimed() == 100;
        let is_locked = |range: LockRange| range.is_locked(&open()).unwrap();
        well &= !is_locked(LockRange::Membership) && !(0..4).any(|n| is_locked(LockRange::Slot(n)));
        drop(reused);
        drop(member);
        // SAFETY: 1. It ends the process.
        unsafe { libc::_exit(i32::from(!well)) };
    }
    let ended = waitpid(Pid::from_raw(child), None).unwrap();
    assert!(matches!(ended, WaitStatus::Exited(_, 0)), "{ended:?}");
    assert_eq!(joined.table().slot(0)[slot::CLAIMED].load(Acquire), 50);
}

#[test]
fn a_forked_child_is_no_member_and_does_not_keep_its_parents_claim() {
    let scratch = Scratch::new("fork");
    let survivor = scratch.join(Share::new());
    let ended =
        child("ledger::tests::child_that_forks", "AQUIFER_TEST", "1", &scratch.0).status().unwrap();
    assert_eq!(ended.signal(), Some(libc::SIGKILL));
    // The child of the dead process lives, and has none of its descriptors.
    survivor.claim(100).unwrap();
}

#[test]
#[ignore = "a child of the test above"]
#[expect(unsafe_code, reason = "forks")]
fn child_that_forks() {
    let member = Share::new().join(Ledger::open(&folder_of_child(), "gpu", 100).unwrap()).unwrap();
    member.claim(50).unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    // SAFETY: 1. The child calls what is allowed in a child of a process with threads: atomics and
    // system calls.
    if unsafe { libc::fork() } == 0 {
        let refused = member.claim(1).is_err_and(|refused| refused.is_forked);
        member.release(50);
        // Its mapping stays.
        let _kept = std::mem::ManuallyDrop::new(member);
        let _shown = unistd::write(&writer, if refused { b"y" } else { b"n" });
        thread::sleep(Duration::from_secs(2));
        process::exit(0);
    }
    let mut answer = [0];
    unistd::read(&reader, &mut answer).unwrap();
    let unchanged = member.ledger().table().slot(1)[slot::CLAIMED].load(Relaxed) == 50;
    if answer == *b"y" && unchanged {
        nix::sys::signal::raise(Signal::SIGKILL).unwrap();
    }
}

#[test]
fn a_short_write_of_the_header_leaves_the_members_as_they_are() {
    let scratch = Scratch::new("overwritten");
    let member = scratch.join(Share::new());
    member.claim(60).unwrap();
    // What another program of the user writes is noise.
    let file = fs::OpenOptions::new().write(true).open(scratch.path()).unwrap();
    file.write_all_at(&[0xff; 64], 0).unwrap();
    assert_eq!(scratch.fault(), FileFault::WrongMagic);
    assert!(member.claim(41).is_err());
    member.measure(|| Some(60));
    member.claim(40).unwrap();
}
