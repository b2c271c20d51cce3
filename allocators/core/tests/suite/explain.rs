//! Tests of the text of an error.

use aquifer_core::{
    Budget, DriverError, MemoryError, NoGpu, OutOfBudget, OutOfMemory, SystemError, Tag,
    budget::{Holding, Raise},
    error::{InUse, Remedy, Stranded, TenantHolding, Tried},
};
use std::error::Error;

#[expect(clippy::unwrap_used, reason = "a helper of tests")]
fn full() -> OutOfMemory {
    let mut error = OutOfMemory::new("device 0".into(), 6 << 30);
    error.live = 73 << 30;
    error.cached = 1 << 30;
    error.physical = 74 << 30;
    error.graphs = 2 << 30;
    (error.largest_free, error.available) = (1 << 30, 1 << 30);
    let budget = Budget::new("the device", 80 << 30);
    let _most = budget.charge(76 << 30).unwrap();
    error.refused = budget.charge(6 << 30).err();
    error.holders = vec![
        Holding { tag: Tag::named("kv-cache"), bytes: 50 << 30, blocks: 400 },
        Holding { tag: Tag::named("weights"), bytes: 20 << 30, blocks: 1 },
    ];
    error.tenants = vec![
        TenantHolding { name: "tenant-a", live: 40 << 30, limit: 48 << 30 },
        TenantHolding { name: "tenant-b", live: 8 << 30, limit: 16 << 30 },
    ];
    error.stranded = vec![Stranded { stream: 2, cached: 1 << 30, pending: 0 }];
    error.tried = vec![
        Tried { step: "fence and poll", gave: 1 << 20 },
        Tried { step: "grow and move", gave: 0 },
    ];
    error
}

#[test]
fn the_text_names_the_refusing_node_the_largest_holders_the_attempts_and_one_action() {
    let expected = include_str!("../golden/out_of_memory.txt").trim_end();
    assert_eq!(MemoryError::OutOfMemory(Box::new(full())).to_string(), expected);
}

#[test]
fn errors_read_the_same_in_debug_so_that_main_may_return_them() {
    #[track_caller]
    fn assert_same(error: impl Error) {
        let text = error.to_string();
        assert!(!text.is_empty() && format!("{error:?}") == text, "{error:?} is not {text}");
    }
    let driver = DriverError { call: "cuMemCreate", code: 2, name: "CUDA_ERROR_OUT_OF_MEMORY" };
    assert_same(driver);
    assert_same(SystemError { call: "mmap", errno: 12 });
    assert_same(NoGpu::Start(driver));
    assert_same(Budget::new("the device", 1).charge(2).map(drop).unwrap_err());
    assert_same(full());
    assert_same(MemoryError::OutOfMemory(Box::new(full())));
    assert_same(MemoryError::NoGpu { asked: 0, why: Box::new(NoGpu::NoLibrary) });
}

#[test]
fn the_refusal_of_a_lease_names_the_setting_that_allows_more_streams() {
    let text = MemoryError::Capacity { max: 64 }.to_string();
    assert!(text.contains("all 64 streams are leased") && text.contains("`streams`"), "{text}");
}

#[test]
fn a_limit_on_live_bytes_is_reported_with_its_owner() {
    let tenant = Budget::new("tenant-a", 8 << 30);
    let _most = tenant.charge(7 << 30);
    let mut error = OutOfMemory::new("device 0".into(), 2 << 30);
    (error.refused, error.of_live_bytes) = (tenant.charge(2 << 30).err(), true);
    (error.live, error.cached, error.largest_free) = (7 << 30, 60 << 30, 60 << 30);
    error.tenants = vec![TenantHolding { name: "tenant-a", live: 7 << 30, limit: 8 << 30 }];
    assert_eq!(error.to_string(), include_str!("../golden/tenant.txt").trim_end());
}

#[test]
fn the_action_fits_the_cause() {
    let action = |error: &OutOfMemory| {
        error.to_string().lines().last().unwrap().trim_start()[2..].trim().to_owned()
    };

    let mut pending = full();
    pending.pending = 5 << 30;
    assert_eq!(
        action(&pending),
        "finish or synchronise the work that still uses 5.00 GiB of freed blocks"
    );
    pending.in_use = vec![InUse { stream: 3, bytes: 4 << 30 }, InUse { stream: 1, bytes: 1 << 30 }];
    assert_eq!(
        action(&pending),
        "synchronise stream 3, whose work still uses 4.00 GiB of freed blocks"
    );
    pending.in_use[0].bytes = 1 << 30;
    assert_eq!(
        action(&pending),
        "finish or synchronise the work that still uses 5.00 GiB of freed blocks"
    );

    let mut absurd = full();
    absurd.requested = 90 << 30;
    absurd.refused = absurd.refused.map(|refused| OutOfBudget { requested: 90 << 30, ..refused });
    assert_eq!(
        action(&absurd),
        "raise the limit of the device to 166.00 GiB, or ask for less at a time"
    );
    absurd.raise = vec![
        Raise { budget: "the device", by: 86 << 30, to: 166 << 30 },
        Raise { budget: "the machine", by: 1 << 30, to: (200 << 30) + 1 },
    ];
    let both = "raise the limit of the device to 166.00 GiB and that of the machine to 200.01 GiB, or ask for less at a time";
    assert_eq!(action(&absurd), both);
    absurd.capacity = 80 << 30;
    assert_eq!(action(&absurd), "ask for less at a time: device 0 has 80.00 GiB in all");

    let mut apart = full();
    apart.cached = 3 << 30;
    assert_eq!(
        action(&apart),
        "ask for at most 1.00 GiB at a time: 7.00 GiB are free, and lie apart between live blocks; or raise the limit of \
         the device to 82.00 GiB"
    );
    (apart.cached, apart.largest_free, apart.stranded[0].cached) = (9 << 30, 8 << 30, 9 << 30);
    assert_eq!(
        action(&apart),
        "ask on stream 2: its cache has 9.00 GiB free and keeps them to itself"
    );
    assert_eq!(apart.remedy(), Remedy::AskOn { stream: 2, bytes: 9 << 30 });
    // Another stream's cache is of no use to a request for whole handles.
    (apart.of_whole_handles, apart.available) = (true, 0);
    assert_eq!(
        action(&apart),
        "free blocks that lie together: 13.00 GiB are free, but no handle is free as a whole; or \
         raise the limit of the device to 82.00 GiB"
    );

    let mut device = full();
    device.refused = None;
    assert_eq!(
        action(&device),
        "free 6.00 GiB or more of the 50.00 GiB that \"kv-cache\" holds: nothing else is left there"
    );
    device.requested = 60 << 30;
    assert_eq!(
        action(&device),
        "free 60.00 GiB or more (\"kv-cache\" holds most, 50.00 GiB): nothing else is left there"
    );
    device.live = 50 << 30;
    assert_eq!(action(&device), "free memory that other programs hold on device 0");

    let mut unknown = full();
    unknown.holders.clear();
    assert_eq!(action(&unknown), "raise the limit of the device to 82.00 GiB");

    let empty = OutOfMemory::new("node 1".into(), 1);
    assert_eq!(action(&empty), "free memory that other programs hold on node 1");
}
