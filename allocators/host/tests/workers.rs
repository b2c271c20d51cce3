//! Workers: where they run, what becomes of jobs that panic, time out or are given up, and of workers that die.
#![expect(clippy::panic, reason = "a worker is made to die of it")]
#![expect(unsafe_code, reason = "maps memory for workers to touch")]

mod support;

use aquifer_host::{
    kernel::{Faults, Kernel, MapPages, SystemCall},
    topology::{Bitmap, NodeId},
    workers::{JobError, RunError, WorkerError, Workers},
};
use nix::libc;
use std::{
    fs,
    num::NonZeroUsize,
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

fn workers() -> Workers {
    Workers::new(&support::topology(), Kernel::new())
}

fn one_worker() -> Workers {
    Workers::with_threads(&support::topology(), Kernel::new(), NonZeroUsize::MIN)
}

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(20))
}

/// Runs into its own panic when somebody drops it.
struct Bomb;
impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("dropped by a worker");
    }
}

#[test]
fn each_piece_runs_once_and_results_come_in_order() {
    let workers = workers();
    assert_eq!(workers.threads(), 0, "no thread is started unasked");
    let runs = Arc::new(AtomicUsize::new(0));
    let seen = runs.clone();
    let job = workers.submit(support::some_node(&support::topology()), 1000, None, move |piece| {
        seen.fetch_add(1, Ordering::Relaxed);
        piece * 2
    });
    let results = job.unwrap().wait(soon()).unwrap();
    assert_eq!(results, (0..1000).map(|n| n * 2).collect::<Vec<_>>());
    assert_eq!(runs.load(Ordering::Relaxed), 1000);
    assert!(workers.threads() >= 1);
    let none = workers.submit(None, 0, None, |_| 1).unwrap();
    assert_eq!(none.wait(soon()).unwrap(), [0; 0]);
}

/// A plain first touch is a preference: a kernel that holds some of a node back gives pages of the next, and says
/// nothing. So nearly all pages must be there, of more than it could hold back; regions ask where theirs really are.
#[test]
fn a_nodes_workers_run_on_its_cpus_and_what_they_touch_lies_there() {
    const SPANS: usize = 8;
    let topology = support::topology();
    let workers = workers();
    for node in topology.nodes().iter().filter(|node| node.memory_allowed && !node.allowed_cpus.is_empty()) {
        let kernel = Kernel::new();
        let (mut there, mut all) = (0, 0);
        for _ in 0..SPANS {
            let fresh = kernel.reserve(NonZeroUsize::new(4 * support::MIB).unwrap()).unwrap();
            // SAFETY: 1. reserved above; nobody else knows of it.
            unsafe { kernel.map(fresh, MapPages::Ordinary).unwrap() };
            let toucher = kernel.clone();
            let bound = workers.run(Some(node.id), soon(), move || {
                // SAFETY: 1. mapped above, and untouched. 2. ordinary pages.
                unsafe { toucher.touch(fresh, 4096) };
                let status = fs::read_to_string("/proc/thread-self/status").unwrap();
                let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
                Bitmap::parse_list(list).unwrap()
            });
            assert_eq!(bound, Ok(node.allowed_cpus.clone()));
            let pages: Vec<usize> = (fresh.start..fresh.end()).step_by(4096).collect();
            let placed = kernel.nodes_of(&pages).unwrap();
            there += placed.iter().filter(|&&n| n == node.id.0 as i32).count();
            all += pages.len();
        }
        assert!(there * 10 >= all * 9, "{there} of {all} pages lie on {}", node.id);
    }
}

#[test]
fn an_unknown_node_and_one_without_cpus_are_refused() {
    let unknown = NodeId(9999);
    let refused = |workers: &Workers, node| workers.submit(Some(node), 1, None, |_| ()).map(drop);
    assert_eq!(refused(&workers(), unknown), Err(WorkerError::UnknownNode { node: unknown }));
    let fixture = Workers::new(&support::fixture("cpuless-node"), Kernel::new());
    assert_eq!(refused(&fixture, NodeId(2)), Err(WorkerError::NoCpus { node: NodeId(2) }));
    let off = Workers::new(&support::topology().without_nodes(), Kernel::new());
    assert_eq!(refused(&off, NodeId(0)), Err(WorkerError::UnknownNode { node: NodeId(0) }));
}

#[test]
fn a_piece_that_panics_fails_its_job_and_no_other() {
    let workers = one_worker();
    let job = workers.submit(None, 3, None, |piece| assert!(piece != 1, "piece 1 is bad")).unwrap();
    let alive = workers.threads();
    assert_eq!(job.wait(soon()), Err(JobError::Panicked { piece: 1 }));
    assert_eq!(workers.run(None, soon(), || 7), Ok(7));
    assert_eq!(workers.threads(), alive, "the same worker");
}

#[test]
fn a_payload_that_panics_when_dropped_does_not_end_the_worker() {
    let workers = one_worker();
    let answer = workers.run(None, soon(), || std::panic::panic_any(Bomb));
    assert_eq!(answer, Err(RunError::NotDone(JobError::Panicked { piece: 0 })));
    assert_eq!(workers.run(None, soon(), || 7), Ok(7));
}

#[test]
fn a_worker_that_dies_is_replaced_also_while_jobs_wait() {
    let workers = one_worker();
    let (at_it, release) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let (told, go) = (at_it.clone(), release.clone());
    let job = workers
        .submit(None, 1, None, move |_| {
            told.wait();
            go.wait();
            Bomb
        })
        .unwrap();
    at_it.wait();
    // Nobody wants the bomb any more, so the worker drops it, and dies of that while another job is queued.
    drop(job);
    let next = workers.submit(None, 1, None, |_| 7).unwrap();
    release.wait();
    assert_eq!(next.wait(soon()).unwrap(), [7]);
    assert_eq!(workers.run(None, soon(), || 8), Ok(8));
}

#[test]
fn after_its_deadline_a_job_begins_no_piece_and_its_results_free_themselves() {
    let workers = one_worker();
    let begun = Arc::new(AtomicUsize::new(0));
    let result = Arc::new(());
    let (count, made) = (begun.clone(), result.clone());
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let deadline = Instant::now() + Duration::from_millis(50);
    let job = workers
        .submit(None, 5, Some(deadline), move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            let _ = released.lock().unwrap().recv();
            made.clone()
        })
        .unwrap();
    assert_eq!(job.wait(Some(deadline)), Err(JobError::TimedOut { done: 0, pieces: 5 }));
    release.send(()).unwrap();
    // The worker is at the next job only when the last is over.
    assert_eq!(workers.run(None, soon(), || 7), Ok(7));
    assert_eq!(begun.load(Ordering::Relaxed), 1);
    assert_eq!(Arc::strong_count(&result), 1, "neither the result nor the work is kept");
}

#[test]
fn a_job_that_waits_behind_another_until_its_deadline_is_not_begun() {
    let workers = one_worker();
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let first = workers.submit(None, 1, None, move |_| released.lock().unwrap().recv().is_ok()).unwrap();
    let late = workers.submit(None, 1, Some(Instant::now()), |_| panic!("begun after its deadline")).unwrap();
    thread::sleep(Duration::from_millis(2));
    release.send(()).unwrap();
    assert_eq!(first.wait(soon()).unwrap(), [true]);
    assert_eq!(late.wait(soon()), Err(JobError::TimedOut { done: 0, pieces: 1 }));
}

#[test]
fn a_prefix_can_be_waited_for_and_taken_while_the_rest_runs() {
    let workers = one_worker();
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let job = workers.submit(None, 3, None, move |piece| {
        if piece == 2 {
            let _ = released.lock().unwrap().recv();
        }
        piece
    });
    let job = job.unwrap();
    job.wait_for(2, soon()).unwrap();
    assert_eq!((job.take(0), job.take(0), job.take(1), job.take(2)), (Some(0), None, Some(1), None));
    release.send(()).unwrap();
    job.wait_for(3, soon()).unwrap();
    assert_eq!((job.done(), job.take(2)), (3, Some(2)));
}

#[test]
fn a_cancelled_job_is_settled_when_nobody_is_at_it() {
    let workers = one_worker();
    let held = Arc::new(());
    let in_work = held.clone();
    let (at_it, begun) = mpsc::channel();
    let job = workers.submit(None, 100, None, move |piece| {
        let _in_work = &in_work;
        let _ = at_it.send(piece);
        thread::sleep(Duration::from_millis(5));
    });
    let job = job.unwrap();
    begun.recv().unwrap();
    job.settle();
    assert_eq!(Arc::strong_count(&held), 1, "the work has been dropped");
    assert!(begun.try_iter().count() < 50);
}

#[test]
fn jobs_of_workers_that_are_gone_are_closed() {
    let workers = one_worker();
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let running = workers.submit(None, 1, None, move |_| released.lock().unwrap().recv().is_ok()).unwrap();
    thread::sleep(Duration::from_millis(5));
    let waiting = workers.submit(None, 1, None, |_| ()).unwrap();
    drop(workers);
    assert_eq!(waiting.wait(soon()), Err(JobError::Closed));
    release.send(()).unwrap();
    let end = running.wait(soon());
    assert!(matches!(end, Ok(_) | Err(JobError::Closed)), "{end:?}");
}

#[test]
fn a_worker_that_cannot_start_or_be_bound_is_an_error_and_one_of_two_is_enough() {
    let topology = support::topology();
    let faults = Arc::new(Faults::new());
    let workers = Workers::new(&topology, Kernel::with_faults(faults.clone()));
    faults.fail(SystemCall::Spawn, 1, libc::EAGAIN);
    let refused = workers.submit(None, 1, None, |_| ()).map(drop);
    assert!(matches!(refused, Err(WorkerError::Spawn { .. })), "{refused:?}");
    if let Some(node) = support::some_node(&topology) {
        faults.fail(SystemCall::Bind, 1, libc::EPERM);
        let refused = workers.submit(Some(node), 1, None, |_| ()).map(drop);
        assert!(
            matches!(refused, Err(WorkerError::Bind { error, .. }) if error.errno == libc::EPERM),
            "{refused:?}"
        );
        assert_eq!(workers.threads(), 0);
    }
    faults.fail(SystemCall::Spawn, 2, libc::EAGAIN);
    assert_eq!(workers.submit(None, 100, None, |piece| piece).unwrap().wait(soon()).unwrap().len(), 100);
}
