//! Tests of workers: where they run, jobs that panic, time out or are cancelled, and workers that
//! die.
#![expect(
    clippy::panic,
    clippy::unwrap_used,
    reason = "a worker is made to die of it; helpers of tests"
)]
#![expect(unsafe_code, reason = "maps memory for workers to touch, and forks")]

use crate::support;
use aquifer_host::{
    kernel::{Faults, Kernel, MapPages, SystemCall},
    topology::{Bitmap, NodeId, Topology},
    workers::{JobError, RunError, WorkerError, Workers},
};
use nix::libc;
use std::{
    env, fs,
    num::NonZeroUsize,
    process,
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

/// Longer than any operation takes on a busy machine, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(120);

fn soon() -> Option<Instant> {
    Some(Instant::now() + PATIENCE)
}

/// Returns the CPUs to which the calling thread is bound according to the kernel.
fn my_cpus() -> Bitmap {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    Bitmap::parse_list(list).unwrap()
}

/// A value whose destructor panics.
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

/// A plain first touch is only a preference: a kernel that reserves part of a node silently uses
/// the next one. The test therefore expects nearly all pages there, of more than the kernel could
/// reserve. Regions query where their pages are.
#[test]
fn a_nodes_workers_run_on_its_cpus_and_what_they_touch_lies_there() {
    const SPANS: usize = 8;
    let topology = support::topology();
    let workers = workers();
    for node in
        topology.nodes().iter().filter(|node| node.memory_allowed && !node.allowed_cpus.is_empty())
    {
        let kernel = Kernel::new();
        let (mut there, mut all) = (0, 0);
        for _ in 0..SPANS {
            let fresh = kernel.reserve(NonZeroUsize::new(4 * support::MIB).unwrap()).unwrap();
            // SAFETY: 1. reserved above, and known only here.
            unsafe { kernel.map(fresh, MapPages::Ordinary).unwrap() };
            let toucher = kernel.clone();
            let bound = workers.run(Some(node.id), soon(), move || {
                // SAFETY: 1. mapped above, and untouched. 2. ordinary pages.
                unsafe { toucher.touch(fresh, 4096) };
                my_cpus()
            });
            assert_eq!(bound, Ok(node.allowed_cpus.clone()));
            let pages: Vec<usize> = (fresh.start..fresh.end()).step_by(4096).collect();
            let placed = kernel.nodes_of(&pages).unwrap();
            there += placed.iter().filter(|&&n| n == node.id.0 as i32).count();
            all += pages.len();
            // A small node has room for one mapping at a time.
            // SAFETY: 1. mapped above; the worker is done with it.
            unsafe { kernel.unmap(fresh).unwrap() };
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
    // The job is no longer wanted, so the worker drops the bomb and dies of it while another job is
    // queued.
    drop(job);
    let next = workers.submit(None, 1, None, |_| 7).unwrap();
    release.wait();
    assert_eq!(next.wait(soon()).unwrap(), [7]);
    assert_eq!(workers.run(None, soon(), || 8), Ok(8));
}

#[test]
fn after_its_deadline_a_job_begins_no_piece_and_its_results_free_themselves() {
    let workers = one_worker();
    // On a busy machine a deadline passes before the worker runs, and then no piece outlasts it.
    let outlasted = [50, 500, 5_000, 50_000].into_iter().any(|millis| {
        let begun = Arc::new(AtomicUsize::new(0));
        let result = Arc::new(());
        let (count, made) = (begun.clone(), result.clone());
        let (release, released) = mpsc::channel::<()>();
        let released = std::sync::Mutex::new(released);
        let deadline = Instant::now() + Duration::from_millis(millis);
        let job = workers
            .submit(None, 5, Some(deadline), move |_| {
                count.fetch_add(1, Ordering::Relaxed);
                let _ = released.lock().unwrap().recv();
                made.clone()
            })
            .unwrap();
        assert_eq!(job.wait(Some(deadline)), Err(JobError::TimedOut { done: 0, pieces: 5 }));
        // The receiver is gone if no piece began.
        let _ = release.send(());
        // The worker reaches the next job only when the last one is over.
        assert_eq!(workers.run(None, soon(), || 7), Ok(7));
        let begun = begun.load(Ordering::Relaxed);
        assert!(begun <= 1, "{begun} pieces, all but the first after the deadline");
        assert_eq!(Arc::strong_count(&result), 1, "neither the result nor the work is kept");
        begun == 1
    });
    assert!(outlasted, "no piece began within 50 seconds");
}

#[test]
fn a_job_that_waits_behind_another_until_its_deadline_is_not_begun() {
    let workers = one_worker();
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let first =
        workers.submit(None, 1, None, move |_| released.lock().unwrap().recv().is_ok()).unwrap();
    let late = workers
        .submit(None, 1, Some(Instant::now()), |_| panic!("begun after its deadline"))
        .unwrap();
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
    assert_eq!((job.done(), job.pieces()), (2, 3));
    assert_eq!(
        (job.take(0), job.take(0), job.take(1), job.take(2)),
        (Some(0), None, Some(1), None)
    );
    release.send(()).unwrap();
    job.wait_for(3, soon()).unwrap();
    assert_eq!((job.done(), job.take(2)), (3, Some(2)));
}

#[test]
fn a_cancelled_job_is_settled_when_no_worker_runs_it() {
    // More pieces than run while this thread waits for a processor.
    const PIECES: usize = 100_000;
    let workers = one_worker();
    let held = Arc::new(());
    let in_work = held.clone();
    let (at_it, begun) = mpsc::channel();
    let job = workers.submit(None, PIECES, None, move |piece| {
        let _in_work = &in_work;
        let _ = at_it.send(piece);
        thread::sleep(Duration::from_millis(5));
    });
    let job = job.unwrap();
    begun.recv().unwrap();
    job.settle();
    assert_eq!(Arc::strong_count(&held), 1, "the work has been dropped");
    assert!(begun.try_iter().count() < PIECES - 1);
}

#[test]
fn jobs_of_workers_that_are_gone_are_closed() {
    let workers = one_worker();
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let (at_it, begun) = mpsc::channel();
    let running = workers.submit(None, 1, None, move |_| {
        let _ = at_it.send(());
        released.lock().unwrap().recv().is_ok()
    });
    begun.recv().unwrap();
    let waiting = workers.submit(None, 1, None, |_| ()).unwrap();
    drop(workers);
    assert_eq!(waiting.wait(soon()), Err(JobError::Closed));
    release.send(()).unwrap();
    assert_eq!(running.unwrap().wait(soon()), Ok(vec![true]), "what has begun is done");
}

#[test]
fn a_worker_that_cannot_start_is_an_error_and_one_of_two_is_enough() {
    let faults = Arc::new(Faults::new());
    let workers = Workers::new(&support::topology(), Kernel::with_faults(faults.clone()));
    faults.fail(SystemCall::Spawn, 1, libc::EAGAIN);
    let refused = workers.submit(None, 1, None, |_| ()).map(drop);
    assert!(matches!(refused, Err(WorkerError::Spawn { .. })), "{refused:?}");
    assert_eq!(workers.threads(), 0);
    faults.fail(SystemCall::Spawn, 2, libc::EAGAIN);
    assert_eq!(
        workers.submit(None, 100, None, |piece| piece).unwrap().wait(soon()).unwrap().len(),
        100
    );
}

#[test]
fn a_worker_that_may_not_be_bound_works_anywhere_and_says_so_while_it_lives() {
    let topology = support::topology();
    let Some(node) = support::some_node(&topology) else {
        println!("skipped: a kernel without NUMA");
        return;
    };
    for errno in [libc::EPERM, libc::EINVAL] {
        let faults = Arc::new(Faults::new());
        let kernel = Kernel::with_faults(faults.clone());
        let workers = Workers::with_threads(&topology, kernel, NonZeroUsize::MIN);
        assert_eq!(workers.shortfall(node), None, "nobody has been refused yet");
        faults.fail(SystemCall::Bind, 1, errno);
        let here = my_cpus();
        assert_eq!(workers.run(Some(node), soon(), my_cpus), Ok(here));
        let told = workers.shortfall(node);
        assert!(
            matches!(told, Some(WorkerError::Bind { node: n, error }) if n == node && error.errno == errno),
            "{told:?}"
        );
        // The worker dies of its result, and its successor is bound.
        let (at_it, begun) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let released = std::sync::Mutex::new(released);
        let fatal = workers.submit(Some(node), 1, None, move |_| {
            let _ = at_it.send(());
            let _ = released.lock().unwrap().recv();
            Bomb
        });
        begun.recv().unwrap();
        drop(fatal);
        release.send(()).unwrap();
        let patience = Instant::now() + PATIENCE;
        while workers.shortfall(node).is_some() && Instant::now() < patience {
            thread::yield_now();
        }
        let cpus = topology.node(node).unwrap().allowed_cpus.clone();
        assert_eq!(workers.run(Some(node), soon(), my_cpus), Ok(cpus));
        assert_eq!(workers.shortfall(node), None);
    }
}

#[test]
fn a_worker_is_bound_to_the_cpus_that_its_node_has_when_it_starts() {
    let real = support::topology().cpus_allowed().value.clone().unwrap();
    let root = env::temp_dir().join(format!("aquifer-workers-{}", process::id()));
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("sys/devices/system/node/online", "0\n");
    write("sys/devices/system/node/node0/cpulist", &real.to_string());
    write("proc/self/status", &format!("Cpus_allowed_list:\t{real}\nMems_allowed_list:\t0\n"));
    let workers = Workers::new(&Topology::read_under(&root).unwrap(), Kernel::new());
    let last = real.iter().last().unwrap().to_string();
    write("sys/devices/system/node/node0/cpulist", &last);
    let bound = workers.run(Some(NodeId(0)), soon(), || my_cpus().to_string());
    fs::remove_dir_all(&root).unwrap();
    assert_eq!(bound, Ok(last));
}

#[test]
fn a_job_gets_an_idle_worker_before_a_new_thread_is_started() {
    let workers = Workers::new(&support::topology(), Kernel::new());
    for _ in 0..100 {
        assert_eq!(workers.run(None, soon(), || 7), Ok(7));
    }
    assert_eq!(workers.threads(), 1, "it was free each time");
    if support::topology().cpus_allowed().value.as_ref().is_some_and(|cpus| cpus.len() < 2) {
        println!("skipped: one CPU");
        return;
    }
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let (at_it, begun) = mpsc::channel();
    let first = workers.submit(None, 1, None, move |_| {
        let _ = at_it.send(());
        released.lock().unwrap().recv().is_ok()
    });
    begun.recv().unwrap();
    assert_eq!(workers.run(None, soon(), || 8), Ok(8));
    assert_eq!(workers.threads(), 2);
    release.send(()).unwrap();
    assert_eq!(first.unwrap().wait(soon()).unwrap(), [true]);
}

#[test]
fn a_forked_child_is_refused_its_parents_workers_and_waits_for_nothing() {
    let workers = one_worker();
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let job =
        workers.submit(None, 2, None, move |_| released.lock().unwrap().recv().is_ok()).unwrap();
    // SAFETY: 1. the child uses only memory, which the C library prepares for it, and leaves by
    // `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: 1. takes a number. A child that blocks is ended by the alarm.
        unsafe { libc::alarm(120) };
        let refused = workers.submit(None, 1, None, |_| ()).map(drop) == Err(WorkerError::Forked);
        let nobody =
            workers.threads() == 0 && workers.shortfall(NodeId(0)) == Some(WorkerError::Forked);
        let never = job.take(0).is_none()
            && job.done() == 0
            && job.wait_for(1, None) == Err(JobError::Closed);
        job.settle();
        drop(workers);
        let right = [refused, nobody, never].iter().position(|right| !right);
        // SAFETY: 1. ends the child.
        unsafe { libc::_exit(right.map_or(0, |wrong| 1 + wrong as i32)) };
    }
    let mut status = -1;
    // SAFETY: 1. the child belongs to this process, and the status is a local.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0), "exit code {}, signal {}", status >> 8, status & 127);
    release.send(()).unwrap();
    release.send(()).unwrap();
    assert_eq!(job.wait(soon()).unwrap(), [true, true], "the parent's job goes on");
}
