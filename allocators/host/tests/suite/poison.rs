//! Tests that `AddressSanitizer` stops accesses to memory of a pool that has no owner. `ci/sanitize`
//! builds with it.
//!
//! Each fault runs in a separate process, which must end because of it.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod with_sanitizer {
    use crate::{
        faults::{self, Fault},
        support::{MIB, host},
    };
    use allocator_api2::alloc::Allocator;
    use aquifer_core::{Budget, DeferReuse, Gate, Result};
    use aquifer_host::{PinnedConfig, PinnedPool, region::PageTier};
    use std::{
        alloc::Layout,
        ptr::NonNull,
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
        time::Instant,
    };

    fn pool() -> PinnedPool {
        let mut config = PinnedConfig::default();
        (config.chunk, config.pages) = (4 * MIB, PageTier::Transparent);
        PinnedPool::new(&host(), &Budget::unlimited("poison"), config).unwrap()
    }

    fn bytes(len: usize) -> Layout {
        Layout::from_size_align(len, 16).unwrap()
    }

    /// Reads a byte, whether allowed or not.
    fn look(block: NonNull<[u8]>, at: usize) -> u8 {
        #[expect(unsafe_code, reason = "reads where nothing should be read")]
        // SAFETY: 1. the region is mapped while its pool lives, and a byte may have any value.
        unsafe {
            block.cast::<u8>().add(at).read_volatile()
        }
    }

    fn free(pool: &PinnedPool, block: NonNull<[u8]>, layout: Layout) {
        #[expect(unsafe_code, reason = "frees a block")]
        // SAFETY: 1. allocated by the pool with this layout.
        unsafe {
            pool.allocator().deallocate(block.cast(), layout);
        }
    }

    #[derive(Debug, Default)]
    struct Door(AtomicBool);

    impl Gate for Door {
        fn is_open(&self) -> bool {
            self.0.load(Ordering::Acquire)
        }

        fn wait(&self, _: Option<Instant>) -> Result<bool> {
            Ok(true)
        }
    }

    /// Each fault touches memory without an owner, except for the first, which touches only its
    /// own.
    const FAULTS: [Fault; 5] = [
        (faults::NONE, || {
            let pool = pool();
            for len in [1, 24, 1000, 100_000, 2 * MIB] {
                let block = pool.allocate(bytes(len)).unwrap();
                (0..len).for_each(|at| _ = look(block, at));
                free(&pool, block, bytes(len));
                let again = pool.allocator().allocate(bytes(len)).unwrap();
                assert_eq!(look(again, len - 1), look(again, len - 1));
            }
        }),
        ("after_free", || {
            let pool = pool();
            let block = pool.allocate(bytes(64)).unwrap();
            free(&pool, block, bytes(64));
            look(block, 0);
        }),
        ("after_free_of_a_large_one", || {
            let pool = pool();
            let block = pool.allocate(bytes(2 * MIB)).unwrap();
            free(&pool, block, bytes(2 * MIB));
            look(block, MIB);
        }),
        ("behind_its_end", || {
            let block = pool().allocate(bytes(24)).unwrap();
            look(block, 24);
        }),
        ("after_its_gate_opened", || {
            let pool = pool();
            let (block, door) = (pool.allocate(bytes(64)).unwrap(), Arc::new(Door::default()));
            pool.allocator().defer(block.cast(), door.clone()).unwrap();
            free(&pool, block, bytes(64));
            look(block, 0); // a copy may still do so
            door.0.store(true, Ordering::Release);
            pool.trim(usize::MAX).unwrap();
            faults::nothing_was_wrong_so_far();
            look(block, 0);
        }),
    ];

    #[test]
    #[ignore = "half of another test, which runs it in a process of its own"]
    fn child() {
        faults::run_named(&FAULTS);
    }

    #[test]
    fn only_accesses_to_memory_without_an_owner_are_reported() {
        faults::assert_each_is_found(
            &FAULTS,
            "poison::with_sanitizer::child",
            &["after_its_gate_opened"],
        );
    }
}
