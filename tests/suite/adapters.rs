//! Tests of pinned memory under every user of an allocator: the conformance suite, the wrappers,
//! arenas, and buffers of another library without a copy.

use crate::support::runtime;
use aquifer::{
    Arena, Budget, DeviceBuffer, Limit, PinnedAllocator, Tag,
    adapters::{ArenaSettings, CountingAllocator, Fallback, Segregate, Tagged},
    conformance::Suite,
    sim::Sim,
    vec::Vec,
};
use arrow_array::{Array, Float32Array, StringArray};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use std::{panic::AssertUnwindSafe, ptr::NonNull, sync::Arc};

#[test]
fn pinned_memory_keeps_the_allocator_contract_bare_and_under_every_wrapper() {
    let sim = Sim::h200(1);
    let rt = runtime(&sim);
    let pool = rt.pinned_near(0);
    let pinned = pool.allocator();
    let suite = Suite { operations: 1000, ..Suite::default() };
    for seed in 0..3 {
        assert_eq!(Suite { seed, ..suite }.check(&pinned), Ok(()));
    }
    let budget = Budget::new("adapters", 1 << 20);
    assert_eq!(suite.check(&Limit::new(pinned, budget)), Ok(()));
    assert_eq!(suite.check(&CountingAllocator::new(pinned)), Ok(()));
    assert_eq!(suite.check(&Tagged::new(pinned, Tag::named("adapters"))), Ok(()));
    let first = Arena::with_settings_in(ArenaSettings::new().limit(4096), pinned);
    assert_eq!(suite.check(&Fallback::new(&first, pinned)), Ok(()));
    drop(first);
    assert_eq!(suite.check(&Segregate::new(1000, pinned, pinned)), Ok(()));
    assert_eq!(suite.check(&&Arena::new_in(pinned)), Ok(()));
    assert_eq!(pool.stats().memory.live, 0);
    assert!(sim.violations().is_empty());
}

/// Returns an Arrow buffer whose bytes are those of the vector in pinned memory. The vector is
/// dropped with its last slice. The pool is consistent if a thread unwinds, which Arrow requires to
/// be declared.
fn buffer<T: arrow_buffer::ArrowNativeType>(values: Vec<T, PinnedAllocator>) -> Buffer {
    let (start, bytes) = (NonNull::from(values.as_slice()).cast(), size_of_val(values.as_slice()));
    #[expect(unsafe_code, reason = "hands the vector's bytes over, with the vector")]
    // SAFETY: 1. The bytes are readable and initialised while the vector lives, which is dropped
    // with the buffer. 2. Moving a vector leaves its bytes in place, and they are not written any
    // more.
    unsafe {
        Buffer::from_custom_allocation(start, bytes, Arc::new(AssertUnwindSafe(values)))
    }
}

fn arrow(values: Vec<f32, PinnedAllocator>) -> ScalarBuffer<f32> {
    let len = values.len();
    ScalarBuffer::new(buffer(values), 0, len)
}

#[test]
fn arrow_buffers_lie_in_pinned_memory_with_no_copy() {
    let sim = Sim::h200(1);
    let rt = runtime(&sim);
    let pool = rt.pinned_near(0);
    let mut values = Vec::with_capacity_in(1 << 16, pool.allocator());
    values.extend((0..1 << 16).map(|at| at as f32));
    let start = values.as_ptr();
    let column = arrow(values);
    assert_eq!(column.as_ptr(), start, "no copy");
    assert_eq!(pool.is_pinned(NonNull::from(&*column).cast()), Some(true));
    let part = column.slice(1000, 500);
    drop(column);
    assert_eq!((part.len(), part[0], part[499]), (500, 1000.0, 1499.0));
    assert!(pool.stats().memory.live > 0, "the slice keeps the memory");
    drop(part);
    assert_eq!(pool.stats().memory.live, 0);
}

/// Whole arrays, as the readers of other libraries use them: numbers, some of them missing, and
/// strings.
#[test]
fn arrow_arrays_are_built_in_pinned_memory_with_no_copy() {
    let sim = Sim::h200(1);
    let rt = runtime(&sim);
    let pool = rt.pinned_near(0);
    let mut numbers = Vec::with_capacity_in(1000, pool.allocator());
    numbers.extend((0..1000).map(|at| at as f32));
    let mut present = Vec::with_capacity_in(125, pool.allocator());
    present.resize(125, 0b0101_0101u8);
    let mut ends = Vec::with_capacity_in(4, pool.allocator());
    ends.extend([0i32, 3, 3, 8]);
    let mut text = Vec::with_capacity_in(8, pool.allocator());
    text.extend_from_slice(b"onethree");
    let starts = [
        numbers.as_ptr().addr(),
        present.as_ptr().addr(),
        ends.as_ptr().addr(),
        text.as_ptr().addr(),
    ];

    let missing = NullBuffer::new(BooleanBuffer::new(buffer(present), 0, 1000));
    let numbers = Float32Array::new(arrow(numbers), Some(missing));
    let text = StringArray::new(
        OffsetBuffer::new(ScalarBuffer::new(buffer(ends), 0, 4)),
        buffer(text),
        None,
    );
    assert_eq!(
        (numbers.null_count(), numbers.value(998), numbers.is_null(999)),
        (500, 998.0, true)
    );
    assert_eq!(text.iter().map(Option::unwrap).collect::<std::vec::Vec<_>>(), ["one", "", "three"]);
    let found = [
        numbers.values().as_ptr().addr(),
        numbers.nulls().unwrap().validity().as_ptr().addr(),
        text.offsets().as_ptr().addr(),
        text.values().as_ptr().addr(),
    ];
    assert_eq!(found, starts, "no copy");

    // Copied to the device from pinned memory: at the speed of the link and without staging.
    let device = rt.device(0).unwrap();
    let s = device.stream().unwrap();
    let mut x: DeviceBuffer<f32> = device.buffer(&s, 1000).unwrap();
    s.scope(|c| c.upload(numbers.values(), &mut x)).unwrap().unwrap();
    let mut back = vec![0.0; 1000];
    s.scope(|c| c.download(&x, &mut back)).unwrap().unwrap();
    assert_eq!(back[999], 999.0);

    // A slice of one array is the last to hold its memory.
    let part = numbers.slice(10, 5);
    drop((numbers, text));
    assert!(pool.stats().memory.live >= 4000);
    assert_eq!((part.len(), part.value(4)), (5, 14.0));
    drop(part);
    assert_eq!(pool.stats().memory.live, 0);
    assert!(sim.violations().is_empty());
}
