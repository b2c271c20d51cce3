//! Tests of parts of buffers.
//!
//! - A part lies where its elements lie, whatever it is a part of.
//! - A use of a part is a use of its whole block. It lasts as long as the part is borrowed,
//!   regardless of other parts.
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::support::{MIB, Rig, read};
use aquifer_core::MemoryError;
use aquifer_device::{Declined, DeviceBuffer};
use aquifer_driver::{Operand, Typed};

fn out_of_range(start: u64, end: u64, len: u64) -> MemoryError {
    MemoryError::OutOfRange { start, end, len }
}

#[test]
fn parts_of_parts_lie_where_their_elements_do() {
    let rig = Rig::new(8);
    let s = rig.stream();
    let mut x: DeviceBuffer<u32> = rig.pool.buffer(&s, 1000).unwrap();
    let start = x.block().address();
    let at = |part: &dyn Operand| (part.range().address - start, part.range().bytes);
    let outer = x.slice(100..900).unwrap();
    let inner = outer.slice(50..60).unwrap();
    assert_eq!((at(&outer), at(&inner), inner.len()), ((400, 3200), (600, 40), 10));
    let (left, right) = inner.split_at(4).unwrap();
    assert_eq!((at(&left), at(&right)), ((600, 16), (616, 24)));
    let (all, none) = inner.split_at(10).unwrap();
    assert_eq!((all.len(), none.len(), none.is_empty(), at(&none)), (10, 0, true, (640, 0)));
    let bytes = left.cast::<u8>().unwrap();
    assert_eq!((bytes.len(), at(&bytes.slice(3..5).unwrap())), (16, (603, 2)));
    {
        let mut whole = x.as_mut_slice();
        let mut part = whole.slice_mut(10..110).unwrap();
        let (mut a, b) = part.split_at_mut(30).unwrap();
        assert_eq!(
            (at(&a), at(&b), at(&b.slice(5..6).unwrap())),
            ((40, 120), (160, 280), (180, 4))
        );
        assert_eq!(at(&a.reborrow().into_slice(29..30).unwrap()), (156, 4));
        let wide = b.cast::<[u32; 2]>().unwrap();
        assert_eq!((at(&wide), wide.len()), ((160, 280), 35));
    }
    assert_eq!(at(&x.as_slice()), (0, 4000));
    rig.assert_silent();
}

#[test]
#[expect(clippy::reversed_empty_ranges, reason = "a range that is refused")]
fn a_range_beyond_a_part_is_refused_with_its_bounds() {
    let rig = Rig::new(8);
    let s = rig.stream();
    let mut x: DeviceBuffer<u32> = rig.pool.buffer(&s, 100).unwrap();
    assert_eq!(x.slice(90..101).unwrap_err(), out_of_range(90, 101, 100));
    let reversed = x.slice(20..10).unwrap_err();
    assert_eq!(reversed, MemoryError::ReversedRange { start: 20, end: 10 });
    assert_eq!(reversed.to_string(), "the range 20..10 is reversed: it ends before it begins");
    assert_eq!(x.slice(0..usize::MAX).unwrap_err(), out_of_range(0, u64::MAX, 100));
    assert_eq!(x.split_at(101).unwrap_err(), out_of_range(101, 101, 100));
    assert_eq!(x.split_at_mut(101).map(drop).unwrap_err(), out_of_range(101, 101, 100));
    let part = x.slice(50..60).unwrap();
    assert_eq!(
        part.slice(5..11).unwrap_err(),
        out_of_range(5, 11, 10),
        "what it is a part of does not count"
    );
}

#[test]
fn a_cast_to_a_type_that_does_not_fit_is_refused_and_returns_the_buffer() {
    let rig = Rig::new(8);
    let s = rig.stream();
    let x: DeviceBuffer<u8> = rig.pool.buffer(&s, 1002).unwrap();
    let address = x.block().address();
    let short = MemoryError::LengthMismatch { from: 1002, to: 1000 };
    assert_eq!(x.as_slice().cast::<u32>().unwrap_err(), short);
    let off = x.slice(1..9).unwrap();
    assert_eq!(off.cast::<u64>().unwrap_err(), MemoryError::BadAlignment { align: 8 });
    assert_eq!(off.cast::<[u8; 4]>().unwrap().len(), 2, "bytes lie anywhere");
    assert_eq!(x.as_slice().cast::<()>().unwrap_err(), MemoryError::ZeroSize);
    let Declined { value: x, error } = x.cast::<u32>().map(drop).unwrap_err();
    assert_eq!((x.len(), x.block().address(), error), (1002, address, short.clone()));
    let x = x.cast::<u16>().unwrap();
    assert_eq!((x.len(), x.range().bytes), (501, 1002));

    let block = x.into_block();
    assert_eq!((block.address(), block.bytes()), (address, 1002));
    let Declined { value: block, error } =
        DeviceBuffer::<u32>::from_block(block).map(drop).unwrap_err();
    assert_eq!(error, short);
    assert_eq!(DeviceBuffer::<[u16; 3]>::from_block(block).unwrap().len(), 167);
    assert_eq!(rig.pool.stats().blocks, 0);
    let block = rig.alloc(&s, 64);
    assert_eq!(DeviceBuffer::<f64>::from_block(block).unwrap().len(), 8);
}

#[test]
fn a_write_of_a_part_waits_for_readers_of_the_whole_and_the_other_way_round() {
    let rig = Rig::stepped(16);
    let (s, u) = (rig.stream(), rig.stream());
    let mut x = rig.bytes(&s, MIB);
    let mut y = rig.bytes(&u, MIB);
    s.fill(&mut x, 1).unwrap();
    u.copy(&x, &mut y).unwrap();
    s.fill(&mut x.slice_mut(0..10).unwrap(), 2).unwrap();
    u.copy(x.slice(5..15).unwrap(), &mut y.slice_mut(0..10).unwrap()).unwrap();
    let back = read(&u, &y);
    assert_eq!(back[..10], [2, 2, 2, 2, 2, 1, 1, 1, 1, 1]);
    assert!(back[10..].iter().all(|&byte| byte == 1));
    rig.assert_silent();
}
