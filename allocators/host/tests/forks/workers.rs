//! Tests of workers: where they run, and tasks that panic or time out.
#![expect(
    clippy::panic,
    clippy::unwrap_used,
    reason = "a worker is made to die of it; helpers of tests"
)]
#![expect(unsafe_code, reason = "maps memory for workers to touch, and forks")]

use crate::support;
use aquifer_host::{
    kernel::{Faults, Kernel, MapPages, SystemCall},
    topology::{IdSet, NodeId, Topology},
    workers::{WorkerError, Workers},
};
use nix::libc;
use std::{
    env, fs,
    num::NonZeroUsize,
    process,
    sync::{Arc, Mutex, mpsc},
};

fn workers() -> Workers {
    Workers::new(&support::topology(), Kernel::new())
}

fn one_worker() -> Workers {
    Workers::with_threads(&support::topology(), Kernel::new(), NonZeroUsize::MIN)
}

/// Returns the CPUs to which the calling thread is bound according to the kernel.
fn my_cpus() -> IdSet {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    IdSet::parse_list(list).unwrap()
}

/// A value whose destructor panics.
struct Bomb;
impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("dropped by a worker");
    }
}

/// Returns a task that waits until it is released, how to release it, and when it has begun.
fn held() -> (impl Fn() + Send + Sync + 'static, mpsc::Sender<()>, mpsc::Receiver<()>) {
    let (release, released) = mpsc::channel::<()>();
    let (at_it, begun) = mpsc::channel();
    let released = Mutex::new(released);
    let task = move || {
        let _ = at_it.send(());
        let _ = released.lock().unwrap().recv();
    };
    (task, release, begun)
}

#[test]
fn each_of_several_workers_runs_a_task_once() {
    let workers = workers();
    assert_eq!(workers.threads(), 0, "no thread is started unasked");
    let most = Workers::PER_NODE.get().min(support::topology().cpus_allowed().unwrap().len());
    let (ran, runs) = mpsc::channel();
    workers.submit(None, 1000, move || ran.send(()).unwrap()).unwrap();
    assert_eq!(runs.iter().count(), most, "then the task is dropped");
    assert_eq!(workers.threads(), most);
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
            let bound = workers.run(Some(node.id), move || {
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
    let refused = |workers: &Workers, node| workers.submit(Some(node), 1, || ());
    assert_eq!(refused(&workers(), unknown), Err(WorkerError::NoCpus { node: unknown }));
    let fixture = Workers::new(&support::fixture("cpuless-node"), Kernel::new());
    assert_eq!(refused(&fixture, NodeId(2)), Err(WorkerError::NoCpus { node: NodeId(2) }));
    let off = Workers::new(&support::topology().without_nodes(), Kernel::new());
    assert_eq!(refused(&off, NodeId(0)), Err(WorkerError::NoCpus { node: NodeId(0) }));
}

#[test]
fn a_task_that_panics_is_lost_and_its_worker_goes_on() {
    let workers = one_worker();
    let lost = workers.run(None, || std::panic::panic_any(Bomb));
    assert_eq!(lost, Err(WorkerError::Lost));
    assert_eq!(workers.run(None, || 7), Ok(7));
}

#[test]
fn what_nobody_has_begun_when_workers_end_is_dropped() {
    let workers = one_worker();
    let (task, release, begun) = held();
    workers.submit(None, 1, task).unwrap();
    begun.recv().unwrap();
    let (unbegun, nobody) = mpsc::channel::<()>();
    workers.submit(None, 1, move || unbegun.send(()).unwrap()).unwrap();
    drop(workers);
    assert!(nobody.recv().is_err());
    release.send(()).unwrap();
    assert!(begun.recv().is_err(), "what has begun is done, and then dropped");
}

#[test]
fn a_worker_that_cannot_start_is_an_error_and_one_of_two_is_enough() {
    let faults = Arc::new(Faults::new());
    let workers = Workers::new(&support::topology(), Kernel::with_faults(faults.clone()));
    faults.fail(SystemCall::Spawn, 1, libc::EAGAIN);
    let refused = workers.submit(None, 1, || ());
    assert!(matches!(refused, Err(WorkerError::Spawn { .. })), "{refused:?}");
    assert_eq!(workers.threads(), 0);
    faults.fail(SystemCall::Spawn, 2, libc::EAGAIN);
    let (ran, runs) = mpsc::channel();
    workers.submit(None, 2, move || ran.send(()).unwrap()).unwrap();
    assert!(runs.iter().count() >= 1);
}

#[test]
fn a_worker_that_may_not_be_bound_works_anywhere_and_says_so() {
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
        assert_eq!(workers.run(Some(node), my_cpus), Ok(here));
        let told = workers.shortfall(node);
        assert!(
            matches!(told, Some(WorkerError::Bind { node: n, error }) if n == node && error.errno == errno),
            "{told:?}"
        );
    }
}

#[test]
fn a_worker_is_bound_to_the_cpus_of_its_node() {
    let topology = support::topology();
    let real = topology.cpus_allowed().unwrap();
    let root = env::temp_dir().join(format!("aquifer-workers-{}", process::id()));
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("sys/devices/system/node/online", "0\n");
    let last = real.iter().last().unwrap().to_string();
    write("sys/devices/system/node/node0/cpulist", &last);
    write("proc/self/status", &format!("Cpus_allowed_list:\t{real}\nMems_allowed_list:\t0\n"));
    let workers = Workers::new(&Topology::read_under(&root).unwrap(), Kernel::new());
    let bound = workers.run(Some(NodeId(0)), || my_cpus().to_string());
    fs::remove_dir_all(&root).unwrap();
    assert_eq!(bound, Ok(last));
}

#[test]
fn a_task_behind_a_busy_worker_gets_a_thread_of_its_own() {
    let workers = Workers::new(&support::topology(), Kernel::new());
    if support::topology().cpus_allowed().is_some_and(|cpus| cpus.len() < 2) {
        println!("skipped: one CPU");
        return;
    }
    let (task, release, begun) = held();
    workers.submit(None, 1, task).unwrap();
    begun.recv().unwrap();
    assert_eq!(workers.run(None, || 8), Ok(8));
    assert_eq!(workers.threads(), 2);
    release.send(()).unwrap();
}

#[test]
fn a_forked_child_is_refused_its_parents_workers_and_waits_for_nothing() {
    let workers = one_worker();
    let (task, release, begun) = held();
    workers.submit(None, 1, task).unwrap();
    // SAFETY: 1. the child uses only memory, which the C library prepares for it, and leaves by
    // `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: 1. takes a number. A child that blocks is ended by the alarm.
        unsafe { libc::alarm(120) };
        let refused = workers.run(None, || ()) == Err(WorkerError::Forked);
        let nobody =
            workers.threads() == 0 && workers.shortfall(NodeId(0)) == Some(WorkerError::Forked);
        drop(workers);
        // SAFETY: 1. ends the child.
        unsafe { libc::_exit(i32::from(!refused) + 2 * i32::from(!nobody)) };
    }
    let mut status = -1;
    // SAFETY: 1. the child belongs to this process, and the status is a local.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0), "exit code {}, signal {}", status >> 8, status & 127);
    begun.recv().unwrap();
    release.send(()).unwrap();
    assert_eq!(workers.run(None, || 7), Ok(7), "the parent's workers go on");
}
