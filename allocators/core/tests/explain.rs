//! What an error says to the person who reads it.

use aquifer_core::{
    Budget, MemoryError, OutOfMemory, Tag,
    budget::Holding,
    error::{Stranded, Tried},
};

#[expect(clippy::unwrap_used, reason = "a helper of tests")]
fn full() -> OutOfMemory {
    let mut error = OutOfMemory::new("device 0".into(), 6 << 30);
    error.live = 70 << 30;
    error.cached = 3 << 30;
    error.physical = 74 << 30;
    error.largest_free = 2 << 30;
    let budget = Budget::new("the device", 80 << 30);
    let _most = budget.charge(76 << 30).unwrap();
    error.refused = budget.charge(6 << 30).err();
    error.holders = vec![
        Holding { tag: Tag::named("kv-cache"), bytes: 50 << 30, blocks: 400 },
        Holding { tag: Tag::named("weights"), bytes: 20 << 30, blocks: 1 },
    ];
    error.stranded = vec![Stranded { stream: 2, cached: 1 << 30, pending: 0 }];
    error.tried =
        vec![Tried { step: "fence and poll", gave: 1 << 20 }, Tried { step: "grow and move", gave: 0 }];
    error
}

#[test]
fn the_text_names_who_refused_the_largest_holder_what_was_tried_and_one_action() {
    let expected = "\
out of memory on device 0: 6.00 GiB requested
  refused by  6.00 GiB asked of the budget of the device, 76.00 GiB of 80.00 GiB used, 4.00 GiB left
  held        70.00 GiB live, 3.00 GiB cached, 0 B pending, 74.00 GiB physical
  largest     2.00 GiB free in one range
  holder      50.00 GiB in 400 blocks: \"kv-cache\"
  holder      20.00 GiB in 1 block: \"weights\"
  stream 2    1.00 GiB cached, 0 B pending
  tried       fence and poll: 1.00 MiB; grow and move: 0 B
  do          free some of the 50.00 GiB that \"kv-cache\" holds, or raise the limit of the device by 2.00 GiB";
    assert_eq!(MemoryError::OutOfMemory(Box::new(full())).to_string(), expected);
}

#[test]
fn the_action_fits_the_cause() {
    let action =
        |error: &OutOfMemory| error.to_string().lines().last().unwrap().trim_start()[2..].trim().to_owned();

    let mut pending = full();
    pending.pending = 5 << 30;
    assert_eq!(action(&pending), "finish or synchronise the streams that still use 5.00 GiB of freed blocks");

    let mut absurd = full();
    absurd.requested = 90 << 30;
    assert_eq!(action(&absurd), "raise the limit of the device above 90.00 GiB, or ask for less at a time");

    let mut device = full();
    device.refused = None;
    assert_eq!(
        action(&device),
        "free some of the 50.00 GiB that \"kv-cache\" holds: the device itself is full"
    );

    let empty = OutOfMemory::new("device 0".into(), 1);
    assert_eq!(action(&empty), "free memory that other programs hold on the device");
}
