//! Single rules of the heap, one test each.
#![expect(
    clippy::unwrap_used,
    reason = "a test fails by panicking, and so do the helpers of its file"
)]

use aquifer_heap::{Config, Extent, Heap, HeapBlock, HeapError, Range};

const BASE: u64 = 0x7f12_3440_0000;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// A heap for device memory with one free range of `len` bytes.
fn device(len: u64) -> Heap {
    let mut heap = Heap::default();
    heap.add(Range::new(BASE, len), 0).unwrap();
    heap
}

fn extents(heap: &Heap) -> Vec<Extent> {
    heap.free_extents().collect()
}

/// Makes the free memory of an empty heap exactly `holes`, with live blocks between.
fn with_holes(heap: &mut Heap, holes: &[u64]) -> Vec<u64> {
    let pairs: Vec<_> = holes
        .iter()
        .map(|&len| (heap.alloc(len, 512).unwrap(), heap.alloc(17 * KIB, 512).unwrap()))
        .collect();
    let rest = extents(heap).last().unwrap().range;
    heap.remove(rest).unwrap();
    pairs.iter().map(|(hole, _)| heap.free_block(hole, 0).map(|_| hole.address).unwrap()).collect()
}

mod fit {
    use super::*;

    #[test]
    fn the_smallest_hole_that_fits_is_taken() {
        let mut heap = Heap::new(Config { small_max: 0, ..Config::device() });
        heap.add(Range::new(BASE, 4 * MIB), 0).unwrap();
        let holes = with_holes(&mut heap, &[64 * KIB, 8 * KIB, 16 * KIB, 4 * KIB]);
        let block = heap.alloc(5 * KIB, 512).unwrap();
        assert_eq!((block.address, block.bytes), (holes[1], 5 * KIB));
        assert_eq!(heap.alloc(5 * KIB, 512).unwrap().address, holes[2]);
    }

    #[test]
    fn a_full_range_is_had_again_at_the_same_address() {
        for len in [512, 16 * KIB, 64 * KIB, 5 * MIB + 512] {
            let mut heap = device(len);
            for stamp in 0..if cfg!(miri) { 5 } else { 100 } {
                let block = heap.alloc(len, 512).unwrap();
                assert_eq!(block.range(), Range::new(BASE, len));
                assert_eq!(heap.alloc(1, 1), None);
                heap.free_block(&block, stamp).unwrap();
                assert_eq!(extents(&heap), [Extent { range: Range::new(BASE, len), stamp }]);
            }
        }
    }

    #[test]
    fn a_range_cut_into_small_blocks_is_whole_again_when_they_are_freed() {
        let whole = if cfg!(miri) { 128 * KIB } else { MIB };
        let mut heap = device(whole);
        let blocks: Vec<_> = std::iter::from_fn(|| heap.alloc(512, 512)).collect();
        assert_eq!(blocks.len() as u64, whole / 512);
        assert_eq!(heap.live_bytes(), heap.managed_bytes());
        for block in blocks {
            heap.free_block(&block, 3).unwrap();
        }
        assert_eq!(heap.largest_free(), whole);
        assert_eq!(heap.alloc(whole, 512).unwrap().address, BASE);
    }

    #[test]
    fn a_hole_too_short_for_a_slab_still_serves_a_small_block() {
        let mut heap = device(3 * 512);
        let [a, b] = [heap.alloc(1024, 512).unwrap(), heap.alloc(1, 1).unwrap()];
        assert_eq!((a.bytes, b.bytes), (1024, 512));
        assert_eq!(heap.alloc(1, 1), None);
    }

    #[test]
    fn a_slot_of_a_larger_class_serves_before_none_is_answered() {
        let mut heap = device(64 * KIB);
        let large: Vec<_> = std::iter::from_fn(|| heap.alloc(4096, 512)).collect();
        heap.free_block(&large[3], 0).unwrap();
        let kept_by_slab = heap.free_bytes() == 0;
        assert!(kept_by_slab, "the freed slot should be one of a slab: {heap:?}");
        let block = heap.alloc(512, 512).unwrap();
        assert_eq!((block.address, block.bytes), (large[3].address, 4096));
    }

    #[test]
    fn none_is_answered_only_after_spare_slabs_are_given_up() {
        let mut heap = device(MIB);
        for bytes in [512, 1024, 1536, 2048, 16 * KIB] {
            let block = heap.alloc(bytes, 512).unwrap();
            heap.free_block(&block, 0).unwrap();
        }
        assert_eq!((heap.free_bytes(), heap.largest_free()), (MIB, MIB));
        assert_eq!(heap.alloc(MIB, 512).map(|block| block.address), Some(BASE));
    }

    #[test]
    fn a_block_aligned_by_luck_is_found_before_none_is_answered() {
        let mut heap = Heap::new(Config { small_max: 0, ..Config::device() });
        for n in 0..20 {
            heap.add(Range::new(BASE + n * MIB + 512, 8 * KIB + n * 512), 0).unwrap();
        }
        // All of the others are long enough, and none reaches a multiple of a MiB but this one.
        heap.add(Range::new(BASE + 64 * MIB, 8 * KIB + 30 * 512), 0).unwrap();
        assert_eq!(heap.alloc(8 * KIB, MIB).unwrap().address, BASE + 64 * MIB);
        assert_eq!(heap.alloc(8 * KIB, MIB), None);
    }

    #[test]
    fn waste_is_at_most_an_eighth_and_nothing_above_the_small_sizes() {
        for config in [Config::device(), Config::host()] {
            let mut heap = Heap::new(config);
            heap.add(Range::new(BASE, 64 * MIB), 0).unwrap();
            let step = if cfg!(miri) { 4001 } else { 61 };
            for bytes in (1..4 * config.small_max).step_by(step) {
                let block = heap.alloc(bytes, 1).unwrap();
                let whole = bytes.next_multiple_of(config.unit);
                let most = if bytes > config.small_max { whole } else { whole + whole / 8 };
                assert!(block.bytes >= bytes && block.bytes <= most, "{} for {bytes}", block.bytes);
                heap.free_block(&block, 0).unwrap();
            }
        }
    }

    #[test]
    fn forty_classes_with_a_block_each_cost_less_than_ten_pages() {
        let mut heap = Heap::new(Config::host());
        heap.add(Range::new(BASE, 64 * MIB), 0).unwrap();
        for n in 1..=40 {
            let _live = heap.alloc(n * 64, 16).unwrap();
        }
        let taken = heap.managed_bytes() - heap.free_bytes();
        assert!(taken < 10 * heap.config().page, "{taken} bytes");
    }

    #[test]
    fn a_request_that_cannot_be_is_answered_with_none() {
        let mut heap = device(MIB);
        for (bytes, align) in [(0, 512), (1, 0), (1, 3), (u64::MAX, 1), (1, 1 << 63), (MIB + 1, 1)]
        {
            assert_eq!(heap.alloc(bytes, align), None, "{bytes} aligned to {align}");
        }
        assert_eq!(heap.largest_free(), MIB);
    }

    #[test]
    fn every_alignment_is_of_the_address_and_what_lies_before_stays_free() {
        let mut heap = Heap::new(Config::host());
        heap.add(Range::new(BASE + 16, 8 * MIB), 0).unwrap();
        for shift in 0..=21 {
            for bytes in [1, 100, 4096, 100_000] {
                let block = heap.alloc(bytes, 1 << shift).unwrap();
                assert_eq!(block.address % (1 << shift), 0);
                heap.free_block(&block, 0).unwrap();
            }
        }
        assert_eq!(extents(&heap), [Extent { range: Range::new(BASE + 16, 8 * MIB), stamp: 0 }]);
    }
}

mod ending {
    use super::*;

    #[test]
    fn each_wrong_address_is_refused_by_its_name_and_changes_nothing() {
        let mut heap = device(MIB);
        let small = heap.alloc(2048, 512).unwrap();
        let large = heap.alloc(100 * KIB, 512).unwrap();
        let gone = heap.alloc(100 * KIB, 512).unwrap();
        heap.free_block(&gone, 0).unwrap();
        let before = (heap.live_bytes(), heap.live_blocks(), extents(&heap));
        for (address, why) in [
            (7, HeapError::Foreign { address: 7 }),
            (BASE + MIB, HeapError::Foreign { address: BASE + MIB }),
            (u64::MAX, HeapError::Foreign { address: u64::MAX }),
            (gone.address, HeapError::DoubleFree { address: gone.address }),
            (small.address + 2048, HeapError::DoubleFree { address: small.address + 2048 }),
            (
                small.address + 1,
                HeapError::Interior { address: small.address + 1, block: small.range() },
            ),
            (
                large.address + 512,
                HeapError::Interior { address: large.address + 512, block: large.range() },
            ),
        ] {
            assert_eq!(heap.free_block(&HeapBlock { address, ..gone }, 9), Err(why));
            assert_eq!(heap.block_at(address), Err(why));
        }
        assert_eq!((heap.live_bytes(), heap.live_blocks(), extents(&heap)), before);
        assert_eq!(heap.check(), Ok(()));
    }

    #[test]
    fn a_note_that_outlived_its_block_is_refused_where_the_address_lives_again() {
        for bytes in [512, 100 * KIB] {
            let mut heap = device(MIB);
            let first = heap.alloc(bytes, 512).unwrap();
            heap.free_block(&first, 0).unwrap();
            assert_eq!(
                heap.free_block(&first, 0),
                Err(HeapError::DoubleFree { address: first.address })
            );
            let second = heap.alloc(bytes, 512).unwrap();
            assert_eq!(second.address, first.address);
            assert_eq!(
                heap.free_block(&first, 0),
                Err(HeapError::Stale { address: first.address })
            );
            assert_eq!(heap.block_at(second.address), Ok(second));
            heap.free_block(&second, 0).unwrap();
        }
    }

    #[test]
    fn a_note_stays_stale_when_its_slab_was_cut_anew_at_the_same_place() {
        let mut heap = device(16 * KIB);
        let first = heap.alloc(1024, 512).unwrap();
        heap.free_block(&first, 0).unwrap();
        let whole = heap.alloc(16 * KIB, 512).unwrap();
        assert!(heap.free_block(&first, 0).is_err());
        heap.free_block(&whole, 0).unwrap();
        let again = heap.alloc(1024, 512).unwrap();
        assert_eq!(again.address, first.address);
        assert_eq!(heap.free_block(&first, 0), Err(HeapError::Stale { address: first.address }));
    }

    #[test]
    fn a_note_of_another_heap_is_refused() {
        let (mut one, mut other) = (device(MIB), Heap::default());
        let block = one.alloc(100 * KIB, 512).unwrap();
        let address = block.address;
        assert_eq!(other.free_block(&block, 0), Err(HeapError::Foreign { address }));
        let small = one.alloc(1, 1).unwrap();
        assert_eq!(other.free_block(&small, 0), Err(HeapError::Foreign { address: small.address }));
    }
}

mod stamps {
    use super::*;

    fn freed(heap: &mut Heap, block: &HeapBlock, stamp: u64) -> Option<Extent> {
        heap.free_block(block, stamp).unwrap();
        heap.free_extent_at(block.address)
    }

    #[test]
    fn merging_takes_the_larger_and_splitting_copies() {
        let mut heap = device(MIB);
        let [a, b, c] = [0; 3].map(|_| heap.alloc(MIB / 4, 512).unwrap());
        assert_eq!(freed(&mut heap, &a, 9).unwrap().stamp, 9);
        assert_eq!(freed(&mut heap, &c, 4).unwrap().stamp, 4);
        let whole = Extent { range: Range::new(BASE, MIB), stamp: 9 };
        assert_eq!(freed(&mut heap, &b, 2), Some(whole));
        let block = heap.alloc(MIB / 4, 512).unwrap();
        assert_eq!(extents(&heap)[0].stamp, 9);
        // The block's own bytes carried 9 when it was made, and a smaller word does not lower it.
        assert_eq!(freed(&mut heap, &block, 1), Some(whole));
        assert_eq!(heap.remove(Range::new(BASE + 4096, 512)), Ok(9));
    }

    #[test]
    fn a_slab_hands_the_largest_stamp_of_its_slots_to_the_extent() {
        let mut heap = device(MIB);
        let blocks: Vec<_> = (0..100).map(|_| heap.alloc(512, 512).unwrap()).collect();
        for (n, block) in blocks.iter().enumerate() {
            heap.free_block(block, if n == 17 { 1000 } else { 1 }).unwrap();
        }
        let touched =
            extents(&heap).into_iter().find(|e| e.range.contains(blocks[17].address)).unwrap();
        assert_eq!(touched.stamp, 1000);
        assert_eq!(heap.remove(Range::new(BASE, MIB)), Ok(1000));
    }

    #[test]
    fn a_tail_that_is_cut_off_carries_the_stamp_of_the_call() {
        let mut heap = device(MIB);
        let block = heap.alloc(MIB, 512).unwrap();
        let shorter = heap.resize_in_place(block.address, MIB / 2, 6).unwrap();
        assert_eq!(shorter.bytes, MIB / 2);
        let tail = Extent { range: Range::new(BASE + MIB / 2, MIB / 2), stamp: 6 };
        assert_eq!(extents(&heap), [tail]);
        // Grown back over it, the block remembers.
        heap.resize_in_place(block.address, MIB, 0).unwrap();
        assert_eq!(freed(&mut heap, &block, 2).unwrap().stamp, 6);
    }
}

mod ranges {
    use super::*;

    #[test]
    fn a_lease_goes_from_one_heap_to_another_and_back() {
        let (mut donor, mut taker) = (device(4 * MIB), Heap::default());
        let block = donor.alloc(MIB, 512).unwrap();
        donor.free_block(&block, 5).unwrap();
        let lease = Range::new(BASE + MIB, 2 * MIB);
        let stamp = donor.remove(lease).unwrap();
        assert_eq!(stamp, 5, "it had merged with what was in use");
        taker.add(lease, stamp).unwrap();
        assert_eq!((donor.managed_bytes(), taker.managed_bytes()), (2 * MIB, 2 * MIB));
        assert_eq!(donor.alloc(2 * MIB, 512), None, "the middle is gone");
        donor.add(lease, taker.remove(lease).unwrap()).unwrap();
        assert_eq!(donor.alloc(4 * MIB, 512).unwrap().address, BASE);
    }

    #[test]
    fn what_is_in_use_cannot_leave_and_the_first_such_address_is_named() {
        let mut heap = device(MIB);
        let block = heap.alloc_at(Range::new(BASE + 256 * KIB, 64 * KIB)).unwrap();
        let range = Range::new(BASE + 4096, 512 * KIB);
        assert_eq!(heap.remove(range), Err(HeapError::NotFree { range, at: block.address }));
        assert_eq!(heap.alloc_at(range), Err(HeapError::NotFree { range, at: block.address }));
        let beyond = Range::new(BASE + 512 * KIB, MIB);
        assert_eq!(heap.remove(beyond), Err(HeapError::NotFree { range: beyond, at: BASE + MIB }));
        assert_eq!(heap.free_bytes(), MIB - 64 * KIB);
        assert!(heap.is_free(Range::new(BASE, 256 * KIB)) && !heap.is_free(range));
    }

    #[test]
    fn spare_slabs_do_not_keep_a_range_from_leaving() {
        let mut heap = device(MIB);
        for bytes in [512, 2048, 8192] {
            let block = heap.alloc(bytes, 512).unwrap();
            heap.free_block(&block, bytes).unwrap();
        }
        assert_eq!(heap.remove(Range::new(BASE, MIB)), Ok(8192));
    }

    #[test]
    fn overlap_is_refused_and_names_what_is_there() {
        let mut heap = device(MIB);
        for (start, len) in
            [(BASE, MIB), (BASE - 512, 1024), (BASE + MIB - 512, 1024), (0, 1 << 50)]
        {
            let range = Range::new(start, len);
            let with = Range::new(BASE, MIB);
            assert_eq!(heap.add(range, 0), Err(HeapError::Overlap { range, with }));
        }
        for (start, len) in
            [(BASE + 2 * MIB, 0), (BASE + 2 * MIB + 1, 512), (BASE + 2 * MIB, 513), (!511, 512)]
        {
            let range = Range::new(start, len);
            assert_eq!(heap.add(range, 0), Err(HeapError::BadRange { range, unit: 512 }));
        }
        assert_eq!(heap.managed_bytes(), MIB);
    }

    #[test]
    fn segments_that_touch_stay_apart() {
        let mut heap = Heap::default();
        for n in 0..3 {
            heap.add_segment(Range::new(BASE + n * MIB, MIB), 0).unwrap();
        }
        let blocks: Vec<_> = std::iter::from_fn(|| heap.alloc(MIB, 512)).collect();
        assert_eq!(blocks.len(), 3);
        assert_eq!(heap.resize_in_place(BASE, 2 * MIB, 0).ok(), None);
        for block in blocks {
            heap.free_block(&block, 0).unwrap();
        }
        assert_eq!(heap.free_extents().count(), 3);
        // Memory that comes back by itself is a segment no more.
        heap.remove(Range::new(BASE, 3 * MIB)).unwrap();
        heap.add(Range::new(BASE, 3 * MIB), 0).unwrap();
        assert_eq!(heap.largest_free(), 3 * MIB);
    }

    #[test]
    fn a_block_at_a_chosen_place_may_be_of_any_size() {
        let mut heap = device(MIB);
        let tiles: Vec<_> =
            (0..16).map(|n| heap.alloc_at(Range::new(BASE + n * 512, 512)).unwrap()).collect();
        assert_eq!(heap.live_blocks(), 16);
        for tile in tiles.iter().rev() {
            assert_eq!(tile.bytes, 512);
            heap.free_block(tile, 0).unwrap();
        }
        assert_eq!(heap.largest_free(), MIB);
    }
}

#[test]
fn a_block_grows_only_into_the_free_memory_above_it() {
    let mut heap = device(MIB);
    let a = heap.alloc(256 * KIB, 512).unwrap();
    let b = heap.alloc(256 * KIB, 512).unwrap();
    let room = HeapError::NoRoom { block: a.range(), wanted: 300 * KIB, available: 256 * KIB };
    assert_eq!(heap.resize_in_place(a.address, 300 * KIB, 0), Err(room));
    let grown = heap.resize_in_place(b.address, 512 * KIB + 1, 0).unwrap();
    assert_eq!(grown.bytes, 512 * KIB + 512);
    let most = HeapError::NoRoom { block: grown.range(), wanted: MIB, available: 768 * KIB };
    assert_eq!(heap.resize_in_place(b.address, MIB, 0), Err(most));
    assert_eq!(heap.resize_in_place(b.address, 0, 0), Err(HeapError::ZeroSize));
    heap.free_block(&b, 0).unwrap();
    assert_eq!(heap.free_bytes(), 768 * KIB);
}

#[test]
fn a_configuration_that_cannot_work_is_refused_by_its_field() {
    let good = Config::device();
    drop((Heap::new(good), Heap::new(Config::host())));
    for (config, field) in [
        (Config { unit: 0, ..good }, "unit 0 "),
        (Config { unit: 48, ..good }, "unit 48 "),
        (Config { page: 256, ..good }, "page 256 "),
        (Config { page: 1 << 40, ..good }, "page 1099511627776 "),
        (Config { grain: 32 * KIB, ..good }, "grain 32768 "),
        (Config { small_max: 700, ..good }, "small_max 700 "),
        (Config { small_max: 64 * KIB, ..good }, "small_max 65536 "),
    ] {
        let refused = std::panic::catch_unwind(|| Heap::new(config)).unwrap_err();
        let message = refused.downcast_ref::<String>().unwrap();
        assert!(message.starts_with(field), "{message}");
    }
}

#[test]
fn a_freed_block_is_not_taken_again_where_another_hole_fits_more_tightly() {
    let mut heap = device(MIB);
    let [a, _apart, c] = [0; 3].map(|_| heap.alloc(64 * KIB, 512).unwrap());
    heap.free_block(&a, 0).unwrap();
    heap.free_block(&c, 0).unwrap();
    let again = heap.alloc(64 * KIB, 512).map(|b| b.address);
    assert_eq!(again, Some(a.address), "c is part of a larger one");
    assert_eq!(heap.alloc(64 * KIB, 512).map(|b| b.address), Some(c.address));
}

#[test]
fn a_note_of_an_earlier_life_is_refused_when_the_block_is_taken_again_as_it_was() {
    let mut heap = device(MIB);
    let block = heap.alloc(64 * KIB, 512).unwrap();
    heap.free_block(&block, 0).unwrap();
    assert_eq!(heap.free_block(&block, 0), Err(HeapError::DoubleFree { address: block.address }));
    let again = heap.alloc(64 * KIB, 512).unwrap();
    assert_eq!(again.address, block.address);
    assert_eq!(heap.free_block(&block, 0), Err(HeapError::Stale { address: block.address }));
    assert_eq!(heap.check(), Ok(()));
}

#[test]
fn an_address_is_found_wherever_it_lies_in_the_grain_of_the_map() {
    // Many blocks begin in each stretch that the map has one entry for, and one block covers
    // several.
    let mut heap = Heap::new(Config { grain: MIB, small_max: 0, ..Config::device() });
    heap.add(Range::new(BASE, 64 * MIB), 0).unwrap();
    let sizes = [KIB, 300 * KIB, 5 * MIB, 2 * KIB, 3 * MIB];
    let blocks: Vec<_> =
        sizes.iter().cycle().take(25).map(|&n| heap.alloc(n, 512).unwrap()).collect();
    for (n, block) in blocks.iter().enumerate() {
        assert_eq!(heap.block_at(block.address), Ok(*block));
        if n % 2 == 0 {
            heap.free_block(block, 0).unwrap();
            assert!(heap.block_at(block.address).is_err());
            assert_eq!(heap.check(), Ok(()));
        }
    }
    let left = blocks.iter().skip(1).step_by(2);
    assert!(left.map(|block| heap.free_block(block, 0)).all(|freed| freed.is_ok()));
    assert_eq!((heap.free_extents().count(), heap.check()), (1, Ok(())));
}

#[test]
fn a_program_that_frees_all_and_begins_again_takes_the_same_places() {
    let mut heap = device(64 << 20);
    let mut round = |order: &[usize]| {
        let sizes = [100, 5_000, 700, 3 << 20, 12_000, 9_000, 1 << 20, 2_000];
        let blocks: Vec<_> = sizes.iter().map(|&bytes| heap.alloc(bytes, 1).unwrap()).collect();
        for &at in order {
            heap.free_block(&blocks[at], 1).unwrap();
        }
        blocks.iter().map(|block| block.address).collect::<Vec<_>>()
    };
    let first = round(&[3, 1, 0, 2, 7, 5, 4, 6]);
    // Empty slabs of several sizes are kept where the first round left them, and given up before
    // the second begins.
    assert_eq!(round(&[0, 7, 1, 6, 2, 5, 3, 4]), first);
    assert_eq!(round(&[0, 1, 2, 3, 4, 5, 6, 7]), first);
}

#[test]
fn draining_takes_exactly_what_is_free_with_its_stamps_and_leaves_what_lives() {
    let mut heap = device(8 * MIB);
    // Exact blocks and slots, every second one freed, so that there are holes, half-empty slabs and
    // spares; the last one freed is kept whole.
    let sizes = [600 * KIB, 3 * KIB, 70 * KIB, 512, 17 * KIB, 9 * KIB];
    let blocks: Vec<_> =
        (0..24).map(|n| heap.alloc(sizes[n % sizes.len()], 512).unwrap()).collect();
    for (stamp, block) in (1..).zip(blocks.iter().step_by(2)) {
        heap.free_block(block, stamp).unwrap();
    }
    let (mut expected, live) = (extents(&heap), heap.live_bytes());
    let managed = heap.managed_bytes() - heap.free_bytes();
    let mut taken = Vec::new();
    heap.drain(MIB, |extent| taken.push(extent));
    assert!(taken.iter().all(|extent| extent.range.len >= MIB));
    heap.drain(0, |extent| taken.push(extent));
    assert!(taken.is_sorted_by(|a, b| a.range.len >= b.range.len));
    taken.sort_unstable_by_key(|extent| extent.range.start);
    expected.sort_unstable_by_key(|extent| extent.range.start);
    assert_eq!(taken, expected);
    assert_eq!((heap.free_bytes(), heap.live_bytes(), heap.managed_bytes()), (0, live, managed));
    heap.check().unwrap();
    for block in blocks.iter().skip(1).step_by(2) {
        heap.free_block(block, 99).unwrap();
    }
    heap.check().unwrap();
}

#[test]
fn freed_slot_key_is_refused_after_its_slab_is_rebuilt_at_another_start() {
    let mut heap = device(64 * MIB);
    let large = heap.alloc(1536, 512).unwrap();
    let stale = heap.alloc(512, 512).unwrap();
    heap.free_block(&large, 0).unwrap();
    heap.free_block(&stale, 0).unwrap();
    // The slab of 512 B slots comes back at another start, so the same address has another slot
    // number.
    let again: Vec<_> = [1024, 512, 512].map(|bytes| heap.alloc(bytes, 512).unwrap()).into();
    assert_eq!(again[2].address, stale.address, "the address lives again");
    assert_ne!(again[2].key, stale.key);
    assert_eq!(heap.size_of_keyed(stale.address, stale.key), None);
    assert_eq!(heap.free_block(&stale, 0), Err(HeapError::Stale { address: stale.address }));
    assert_eq!(
        heap.free_keyed(stale.address, stale.key, 0),
        Err(HeapError::Stale { address: stale.address })
    );
    heap.check().unwrap();
}

#[test]
fn no_two_blocks_of_a_heap_ever_have_the_same_address_and_key() {
    use std::collections::HashSet;
    let mut seen = HashSet::new();
    let mut heap = device(256 * KIB);
    let mut live = Vec::new();
    let mut random = 1u64;
    for _ in 0..if cfg!(miri) { 300 } else { 20_000 } {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let draw = random >> 33;
        if draw.is_multiple_of(3) && !live.is_empty() {
            let block: HeapBlock = live.swap_remove(draw as usize / 3 % live.len());
            heap.free_block(&block, 0).unwrap();
        } else if let Some(block) = heap.alloc(512 << (draw / 3 % 5), 512) {
            assert!(seen.insert((block.address, block.key)), "{block:?} was handed out before");
            live.push(block);
        } else {
            // Everything goes at once, so that slabs are dissolved and built elsewhere.
            for block in live.drain(..) {
                heap.free_block(&block, 0).unwrap();
            }
        }
    }
}
