//! A column of words for the GPU: an array of Arrow and a map of hashbrown, both in pinned memory.
//!
//! Each word is replaced by its number in a dictionary, as Arrow and Parquet do with strings. The
//! numbers are an Arrow array whose bytes the device's copy engine reads where they lie.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]
#![expect(unsafe_code, reason = "hands a vector's bytes to Arrow, with the vector")]

use aquifer::{Bytes, DeviceBuffer, PinnedAllocator, Runtime, vec::Vec};
use arrow_array::UInt32Array;
use arrow_buffer::{Buffer, ScalarBuffer};
use hashbrown::{DefaultHashBuilder, HashMap};
use std::{error::Error, panic::AssertUnwindSafe, ptr::NonNull, sync::Arc};

/// Any type over `allocator_api2` takes the allocator of a pinned pool, which is `Copy`.
type Dictionary = HashMap<&'static str, u32, DefaultHashBuilder, PinnedAllocator>;

/// Makes an array of the vector, without a copy. The vector is dropped with the array's last slice.
fn array(values: Vec<u32, PinnedAllocator>) -> UInt32Array {
    let len = values.len();
    let (start, bytes) = (NonNull::from(values.as_slice()).cast(), size_of_val(values.as_slice()));
    // SAFETY: 1. the bytes are initialised, and readable while the vector lives, which the buffer
    // owns. 2. a vector that is moved leaves its bytes in place, and nothing writes them any more.
    let buffer =
        unsafe { Buffer::from_custom_allocation(start, bytes, Arc::new(AssertUnwindSafe(values))) };
    UInt32Array::new(ScalarBuffer::new(buffer, 0, len), None)
}

fn main() -> Result<(), Box<dyn Error>> {
    // A limit of all pinned memory: pages that cannot be swapped out are missed elsewhere.
    let rt = Runtime::builder().or_sim().pinned_budget(16 << 20).build()?;
    let pinned = rt.pinned_near(0); // on the NUMA node next to the first device
    let words = ["to", "be", "or", "not", "to", "be"].into_iter().cycle().take(1 << 20);

    let mut dictionary =
        Dictionary::with_hasher_in(DefaultHashBuilder::default(), pinned.allocator());
    let mut numbers = Vec::with_capacity_in(1 << 20, pinned.allocator());
    for word in words {
        let next = u32::try_from(dictionary.len())?;
        numbers.push(*dictionary.entry(word).or_insert(next));
    }
    let column = array(numbers);
    assert_eq!((column.len(), dictionary.len(), dictionary["not"]), (1 << 20, 4, 3));
    let start = NonNull::from(&column.values()[..]).cast();
    assert_eq!(pinned.is_pinned(start), Some(true), "built in place");

    // Slices share the memory, so parts of a column are copied without being gathered.
    let pool = rt.device(0)?;
    let s = pool.stream()?;
    let part = column.slice(3, 1000);
    let mut x: DeviceBuffer<u32> = pool.buffer(&s, part.len())?;
    let mut back = vec![0; part.len()];
    s.try_scope(|copies| {
        copies.upload(&part.values()[..], &mut x)?;
        copies.download(&x, &mut back)
    })?;
    assert_eq!(&back[..4], [3, 0, 1, 0]);
    println!("{} of pinned memory are in use", Bytes(pinned.stats().memory.live));

    // What does not fit is an error to a program that asks, instead of its end.
    let mut more: Vec<u32, _> = Vec::new_in(pinned.allocator());
    assert!(more.try_reserve(16 << 20).is_err());
    drop(column);
    assert!(pinned.stats().memory.live > 0, "the slice keeps the column");
    drop((part, dictionary));
    assert_eq!(pinned.stats().memory.live, 0);
    println!("and none after the last slice");
    Ok(())
}
