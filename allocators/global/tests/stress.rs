//! Threads that allocate, pass blocks on and free them, under tags and in routes, while signals
//! come and the process forks: every byte keeps its contents, every child works, and in the end all
//! counts are what they were.
//!
//! - A handler allocates, frees and routes whenever its thread is outside of the allocator, which
//!   is all that the wrapped one allows.
//! - A child is made while the others are anywhere, also inside of the allocator.
//!
//! A binary without a test harness: it counts what the process allocates.
#![cfg_attr(target_os = "linux", expect(unsafe_code, reason = "forks, handles signals"))]

#[cfg(target_os = "linux")]
mod linux {
    use aquifer_core::{Tag, impl_allocator, tagged};
    use aquifer_global::{Global, Over, RouteId, Tracked, held_under, register, route, stats};
    use std::{
        alloc::System,
        cell::Cell,
        hint::black_box,
        process,
        ptr::NonNull,
        sync::{
            Barrier, Mutex, PoisonError,
            atomic::{AtomicBool, AtomicUsize, Ordering},
        },
        thread,
    };

    #[global_allocator]
    static GLOBAL: Global<System, Tracked> = Global::new();

    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(status: i32) -> !;
        fn signal(signal: i32, handler: extern "C" fn(i32)) -> usize;
        fn pthread_self() -> usize;
        fn pthread_kill(thread: usize, signal: i32) -> i32;
    }

    const SIGUSR1: i32 = 10;
    const THREADS: usize = 3;
    const ROUNDS: usize = 400;
    const CHILDREN: usize = 12;
    /// Each block of the strip, and how many there are.
    const PIECE: usize = 4096;
    const PIECES: usize = 4096;

    /// Pieces of one size, each taken and returned by an atomic, so that no lock is held across a
    /// fork.
    struct Strip {
        start: NonNull<u8>,
        taken: [AtomicBool; PIECES],
        from: AtomicUsize,
    }

    // SAFETY: the bytes behind the pointer belong to the thread that took the piece.
    unsafe impl Send for Strip {}
    // SAFETY: the rest is atomics.
    unsafe impl Sync for Strip {}

    impl Strip {
        fn live(&self) -> usize {
            self.taken.iter().filter(|taken| taken.load(Ordering::Relaxed)).count()
        }
    }

    impl_allocator! {
        // SAFETY: the thread that sets a piece's flag gets it, and the flag is cleared when it is
        // returned.
        unsafe impl ['s] for &'s Strip {
            fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                if layout.size() > PIECE || layout.align() > 64 {
                    return Err(AllocError);
                }
                let from = self.from.fetch_add(1, Ordering::Relaxed);
                let free = (from..from + PIECES).map(|at| at % PIECES).find(|&at| {
                    !self.taken[at].load(Ordering::Relaxed) && !self.taken[at].swap(true, Ordering::Acquire)
                });
                let at = free.ok_or(AllocError)? * PIECE;
                // SAFETY: the offset lies in the strip.
                Ok(NonNull::slice_from_raw_parts(unsafe { self.start.add(at) }, layout.size()))
            }

            unsafe fn deallocate(&self, block: NonNull<u8>, _layout: Layout) {
                let at = (block.addr().get() - self.start.addr().get()) / PIECE;
                assert!(self.taken[at].swap(false, Ordering::Release), "freed twice");
            }
        }
    }

    fn strip() -> (RouteId, &'static Strip) {
        #[repr(align(64))]
        struct Line(#[expect(dead_code, reason = "only its place counts")] [u8; 64]);
        let bytes = Vec::<Line>::with_capacity(PIECE * PIECES / 64).leak();
        let strip = Strip {
            start: NonNull::from(bytes).cast(),
            taken: [const { AtomicBool::new(false) }; PIECES],
            from: AtomicUsize::new(0),
        };
        let strip: &'static Strip = Box::leak(Box::new(strip));
        let start = strip.start.addr().get();
        // SAFETY: 1. Its blocks lie in its window and no other allocator's do. 2. Atomics work at
        // any time.
        let over = Box::leak(Box::new(unsafe { Over::new(strip, start..start + PIECE * PIECES) }));
        let Ok(to) = register(over) else { process::abort() };
        (to, strip)
    }

    thread_local! {
        /// Whether this thread is outside of the allocator, and where its handler may route to.
        static OUTSIDE: Cell<Option<RouteId>> = const { Cell::new(None) };
    }

    static HANDLED: AtomicUsize = AtomicUsize::new(0);
    static WRONG: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn handler(_: i32) {
        let Some(to) = OUTSIDE.get() else { return };
        if works(to, 0xAB) {
            HANDLED.fetch_add(1, Ordering::Relaxed);
        } else {
            WRONG.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Allocates, grows, routes and frees, and says whether contents stayed.
    fn works(to: RouteId, with: u8) -> bool {
        let tag = Tag::from_index(7).unwrap_or(Tag::OTHER);
        let (mut plain, routed) =
            tagged(tag, || (vec![with; 500], route(to, 1000, || vec![with; 3000])));
        plain.resize(20_000, with);
        let whole = black_box(&plain).iter().chain(black_box(&routed)).all(|&byte| byte == with);
        let zeroed = route(to, 1000, || vec![0u8; 2000]);
        whole && black_box(&zeroed).iter().all(|&byte| byte == 0)
    }

    /// A time outside of the allocator, in which a handler may use it.
    fn outside(to: RouteId, turns: u32) {
        OUTSIDE.set(Some(to));
        (0..turns).for_each(|turn| _ = black_box(turn));
        OUTSIDE.set(None);
    }

    fn work(seed: usize, to: RouteId, shelf: &Mutex<Vec<Vec<u8>>>) {
        let tags = [5, 6, 7].map(|tag| Tag::from_index(tag).unwrap_or(Tag::OTHER));
        let mut numbers = seed as u64 + 1;
        let mut next = move || {
            numbers = numbers
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (numbers >> 33) as usize
        };
        let is_whole = |block: &[u8]| block.iter().all(|byte| *byte == block.len() as u8);
        for _ in 0..ROUNDS {
            let (size, tag) = (next() % 6000 + 1, tags[next() % 3]);
            let mut block = tagged(tag, || match next() % 3 {
                0 => vec![size as u8; size],
                _ => route(to, 1000, || vec![size as u8; size]),
            });
            outside(to, 2000);
            if next() % 2 == 0 {
                let larger = size + next() % 3000;
                block.clear();
                block.resize(larger, larger as u8);
            }
            assert!(is_whole(&block));
            let other = {
                let mut shelf = shelf.lock().unwrap_or_else(PoisonError::into_inner);
                shelf.push(block);
                let at = next() % shelf.len();
                (shelf.len() > 20).then(|| shelf.swap_remove(at))
            };
            assert!(other.is_none_or(|block| is_whole(&block)), "somebody else's");
        }
    }

    /// Forks while the others work. What they did in the middle of at that moment is half done in
    /// the child, so it looks at contents and not at counts.
    fn fork_and_wait(to: RouteId) {
        // SAFETY: the child calls the allocator, which the C library makes ready for one, and
        // leaves by `_exit`.
        let child = unsafe { fork() };
        if child == 0 {
            let right = (0..20).all(|round| works(to, round));
            // SAFETY: ends the child.
            unsafe { _exit(if right { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: the child is this process's, and the status a local.
        let waited = unsafe { waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0), "the child");
    }

    pub(super) fn main() {
        let (to, strip) = strip();
        let _warm = thread::spawn(|| black_box(vec![0u8; 10]).len()).join();
        // SAFETY: the handler has its type, and allocates outside of the allocator only.
        unsafe { signal(SIGUSR1, handler) };
        // The handler's own first time.
        assert!((0..100).all(|_| works(to, 1)));
        let shelf = Mutex::new(Vec::with_capacity(64));
        let (ids, ended) = ([const { AtomicUsize::new(0) }; THREADS], AtomicUsize::new(0));
        let (before, ready) = (stats(), Barrier::new(THREADS + 1));
        thread::scope(|threads| {
            let (ids, shelf, ready, ended) = (&ids, &shelf, &ready, &ended);
            let running: Vec<_> = (0..THREADS)
                .map(|seed| {
                    threads.spawn(move || {
                        // SAFETY: names the calling thread.
                        ids[seed].store(unsafe { pthread_self() }, Ordering::Relaxed);
                        ready.wait();
                        work(seed, to, shelf);
                        ended.fetch_add(1, Ordering::Relaxed);
                        // A thread that has ended gets no signal.
                        ready.wait();
                    })
                })
                .collect();
            ready.wait();
            let mut children = 0;
            while ended.load(Ordering::Relaxed) < THREADS || children < CHILDREN {
                for id in ids {
                    // SAFETY: the thread waits for this one before it ends.
                    assert_eq!(unsafe { pthread_kill(id.load(Ordering::Relaxed), SIGUSR1) }, 0);
                }
                if children < CHILDREN {
                    fork_and_wait(to);
                    children += 1;
                }
            }
            ready.wait();
            for thread in running {
                assert!(thread.join().is_ok());
            }
        });
        OUTSIDE.set(Some(to));
        // SAFETY: the calling thread.
        assert_eq!(unsafe { pthread_kill(pthread_self(), SIGUSR1) }, 0);
        OUTSIDE.set(None);
        assert!(HANDLED.load(Ordering::Relaxed) > 0, "no signal found its thread outside");
        assert_eq!(WRONG.load(Ordering::Relaxed), 0);

        shelf.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let after = stats();
        assert_eq!((after.live, after.routed, strip.live()), (before.live, 0, 0), "totals at rest");
        for tag in (5..8).filter_map(Tag::from_index) {
            assert_eq!(held_under(tag).map(|held| (held.live, held.blocks)), Some((0, 0)));
        }
    }
}

#[cfg(target_os = "linux")]
fn main() {
    linux::main();
}

#[cfg(not(target_os = "linux"))]
fn main() {}
