//! Allocations work wherever the wrapped allocator's do: before `main`, in thread-local
//! destructors, in a forked child, in signal handlers; and a report comes at exit.
//!
//! A binary without a test harness: it runs itself as a child process, and counts what it
//! allocates.
#![cfg_attr(
    target_os = "linux",
    expect(unsafe_code, reason = "runs before main, forks, handles signals")
)]

#[cfg(target_os = "linux")]
mod linux {
    use aquifer_core::{Tag, impl_allocator, tagged};
    use aquifer_global::{
        Global, Over, ReportTo, RouteId, Tracked, held_under, is_installed, register,
        report_at_exit, route, stats,
    };
    use std::{
        alloc::System,
        env, fs,
        hint::black_box,
        process::{self, Command, Output},
        ptr::NonNull,
        sync::{
            Mutex, OnceLock,
            atomic::{AtomicU64, AtomicUsize, Ordering},
        },
        thread,
    };

    #[global_allocator]
    static GLOBAL: Global<System, Tracked> = Global::new();

    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(status: i32) -> !;
        fn raise(signal: i32) -> i32;
        fn signal(signal: i32, handler: extern "C" fn(i32)) -> usize;
    }

    static EARLY: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    static BEFORE_MAIN: AtomicU64 = AtomicU64::new(0);

    extern "C" fn before_main() {
        let live = stats().live;
        if let Ok(mut early) = EARLY.lock() {
            early.extend_from_slice(&[7; 100_000]);
            early.shrink_to_fit();
        }
        drop(black_box(vec![0u8; 1 << 20]));
        BEFORE_MAIN.store(stats().live - live, Ordering::Relaxed);
    }

    // SAFETY: the loader calls what stands there once, before `main`; the function has its type and
    // does not unwind.
    #[used]
    #[unsafe(link_section = ".init_array")]
    static FIRST: extern "C" fn() = before_main;

    /// Serves one block after another from a window, with nothing but an atomic.
    struct Strip {
        start: NonNull<u8>,
        used: AtomicUsize,
        freed: AtomicUsize,
    }

    const STRIP: usize = 64 << 20;

    // SAFETY: the bytes behind the pointer belong to the caller that requested them.
    unsafe impl Send for Strip {}
    // SAFETY: the rest is atomics.
    unsafe impl Sync for Strip {}

    impl_allocator! {
        // SAFETY: blocks are cut off one after another.
        unsafe impl ['s] for &'s Strip {
            fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                let bytes = layout.size().next_multiple_of(64);
                let at = self.used.fetch_add(bytes, Ordering::Relaxed);
                if layout.align() > 64 || at + bytes > STRIP {
                    return Err(AllocError);
                }
                // SAFETY: the offset lies in the strip.
                Ok(NonNull::slice_from_raw_parts(unsafe { self.start.add(at) }, layout.size()))
            }

            unsafe fn deallocate(&self, _block: NonNull<u8>, _layout: Layout) {
                self.freed.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    static TO: OnceLock<(RouteId, &'static Strip)> = OnceLock::new();

    fn strip() -> (RouteId, &'static Strip) {
        *TO.get_or_init(|| {
            #[repr(align(64))]
            struct Line(#[expect(dead_code, reason = "only its place counts")] [u8; 64]);
            let bytes = Vec::<Line>::with_capacity(STRIP / 64).leak();
            let start = NonNull::from(bytes).cast();
            let strip: &'static Strip = Box::leak(Box::new(Strip {
                start,
                used: AtomicUsize::new(0),
                freed: AtomicUsize::new(0),
            }));
            let window = start.addr().get()..start.addr().get() + STRIP;
            // SAFETY: 1. The strip's blocks lie in its window and no other allocator's do. 2.
            // Atomics work at any time.
            let over = Box::leak(Box::new(unsafe { Over::new(strip, window) }));
            match register(over) {
                Ok(to) => (to, strip),
                Err(_) => process::abort(),
            }
        })
    }

    pub(super) fn main() {
        match env::args().nth(1).as_deref() {
            Some("asks") => asks_for_a_report(),
            Some("plain") => {
                black_box(tagged(Tag::named("plain"), || vec![1u8; 5000]).leak());
            }
            _ => tests(),
        }
    }

    fn tests() {
        assert!(is_installed());
        let _warm = thread::spawn(|| black_box(vec![0u8; 10]).len()).join();
        before_main_is_counted();
        a_forked_child_allocates_frees_and_routes();
        a_signal_handler_allocates_frees_and_routes();
        a_report_comes_at_exit_when_asked();
    }

    fn before_main_is_counted() {
        assert_eq!(BEFORE_MAIN.load(Ordering::Relaxed), 100_000);
        let live = stats().live;
        let early = EARLY.lock().map(|mut early| std::mem::take(&mut *early)).unwrap_or_default();
        assert!(early.len() == 100_000 && early.iter().all(|&byte| byte == 7));
        drop(early);
        assert_eq!(live - stats().live, 100_000);
    }

    /// Allocates, frees, grows and routes, and says whether the counts are right.
    fn works() -> bool {
        let tag = Tag::from_index(9).unwrap_or(Tag::OTHER);
        let Some(&(to, strip)) = TO.get() else { return false };
        let (before, held, freed) = (stats(), held_under(tag), strip.freed.load(Ordering::Relaxed));
        let mut block = tagged(tag, || vec![1u8; 3000]);
        block.reserve_exact(100_000);
        let routed = tagged(tag, || route(to, 1000, || vec![2u8; 5000]));
        let during = stats();
        let live = during.live - before.live == block.capacity() as u64;
        let routes = during.routed - before.routed == 5000;
        let whole = block.iter().all(|&byte| byte == 1) && routed.iter().all(|&byte| byte == 2);
        drop((block, routed));
        let after = stats();
        live && routes
            && whole
            && (after.live, after.routed) == (before.live, before.routed)
            && held_under(tag).map(|held| held.live) == held.map(|held| held.live)
            && strip.freed.load(Ordering::Relaxed) == freed + 1
    }

    fn a_forked_child_allocates_frees_and_routes() {
        let _ = strip();
        assert!(works());
        // SAFETY: the child calls the allocator only, and leaves by `_exit`. No other thread is
        // there.
        let child = unsafe { fork() };
        if child == 0 {
            let right = works();
            // SAFETY: ends the child.
            unsafe { _exit(if right { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: the child is this process's, and the status a local.
        let waited = unsafe { waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0));
    }

    static HANDLED: AtomicU64 = AtomicU64::new(0);

    extern "C" fn handler(_: i32) {
        // Not while the thread is inside of the allocator: the wrapped one does not allow that.
        if works() {
            HANDLED.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn a_signal_handler_allocates_frees_and_routes() {
        const SIGUSR1: i32 = 10;
        // SAFETY: the handler has its type, and is only called by `raise`, outside of the
        // allocator.
        unsafe { signal(SIGUSR1, handler) };
        let before = stats().live;
        let (to, strip) = strip();
        // Within scopes of the interrupted thread as well.
        let block = tagged(Tag::OTHER, || {
            route(to, 1 << 20, || {
                // SAFETY: the signal is handled.
                (0..20).for_each(|_| assert_eq!(unsafe { raise(SIGUSR1) }, 0));
                vec![1u8; 100]
            })
        });
        assert!(strip.used.load(Ordering::Relaxed) > 0);
        assert_eq!(HANDLED.load(Ordering::Relaxed), 20);
        drop(block);
        assert_eq!(stats().live, before);
    }

    fn asks_for_a_report() {
        report_at_exit(ReportTo::Stderr);
        black_box(tagged(Tag::named("asked"), || vec![1u8; 70_000]).leak());
    }

    #[expect(clippy::panic, reason = "a test, though not in a harness")]
    fn run(job: &str, variable: Option<&str>) -> Output {
        let program = env::current_exe().unwrap_or_default();
        let mut command = Command::new(program);
        command.arg(job).env_remove("AQUIFER_GLOBAL_REPORT");
        if let Some(value) = variable {
            command.env("AQUIFER_GLOBAL_REPORT", value);
        }
        match command.output() {
            Ok(output) => output,
            Err(e) => panic!("the child cannot run: {e}"),
        }
    }

    fn a_report_comes_at_exit_when_asked() {
        let says = |job: &str, variable: Option<&str>| {
            let output = run(job, variable);
            assert!(output.status.success(), "{output:?}");
            String::from_utf8_lossy(&output.stderr).into_owned()
        };
        assert_eq!(says("plain", None), "");
        let asked = says("asks", None);
        assert!(
            asked.starts_with("aquifer: live ")
                && asked.contains("asked: live 68.36 KiB in 1 blocks"),
            "{asked}"
        );
        let plain = says("plain", Some("stderr"));
        assert!(plain.contains("plain: live 4.88 KiB in 1 blocks"), "{plain}");

        let folder = env::temp_dir().join(format!("aquifer-report-{}", process::id()));
        assert!(fs::create_dir(&folder).is_ok());
        let file = format!("{}/of-%p", folder.display());
        assert_eq!(says("asks", Some(&file)), "", "the environment has the last word");
        let written: Vec<_> = fs::read_dir(&folder).into_iter().flatten().flatten().collect();
        assert_eq!(written.len(), 1);
        let text = written
            .first()
            .and_then(|entry| fs::read_to_string(entry.path()).ok())
            .unwrap_or_default();
        assert!(text.contains("asked: live 68.36 KiB"), "{text}");
        assert!(fs::remove_dir_all(&folder).is_ok());

        for slip in ["stdout", "", "1", "/tmp/"] {
            let told = says("plain", Some(slip));
            assert_eq!(
                told,
                format!(
                    "aquifer: AQUIFER_GLOBAL_REPORT: '{slip}' is neither 'stderr' nor a path; a file in the current \
                     folder is named ./FILE\n"
                )
            );
        }
        let nowhere = says("plain", Some("/no/such/folder/report"));
        assert!(
            nowhere
                .starts_with("aquifer: the report cannot be written to /no/such/folder/report: "),
            "{nowhere}"
        );
    }
}

#[cfg(target_os = "linux")]
fn main() {
    linux::main();
}

#[cfg(not(target_os = "linux"))]
fn main() {}
