//! Tests of devices that drain, are lost and are added again.

use super::*;
use aquifer::placement::Health;

/// Loses a device, and makes a call that reports it.
fn lose(sim: &Sim, device: u32) {
    sim.lose_device(DeviceId(device));
    assert!(sim.driver().memory_info(DeviceId(device)).is_err());
}

#[test]
fn nothing_new_goes_to_a_device_that_drains_and_what_is_leased_lives_on() {
    let (_, rt) = machine(2, 100);
    let placer = rt.placer(Policy::MostFree);
    let lease = placer.place(&PlacementRequest::bytes(10 * MIB).only([DeviceId(0)])).unwrap();
    placer.drain(DeviceId(0)).unwrap();
    for policy in every_policy() {
        assert_eq!(place(&rt.placer(policy), 1).unwrap().device(), DeviceId(1), "of all placers");
    }
    assert!(lease.alloc(&lease.stream().unwrap(), Request::bytes(10 * MIB)).is_ok());
    let only = placer.place(&PlacementRequest::bytes(MIB).only([DeviceId(0)])).unwrap_err();
    assert_eq!((why(&only, 0), why(&only, 1)), (RejectReason::Draining, RejectReason::Excluded));
    placer.undrain(DeviceId(0)).unwrap();
    assert!(placer.place(&PlacementRequest::bytes(MIB).only([DeviceId(0)])).is_ok());
    assert_eq!(placer.drain(DeviceId(7)), Err(MemoryError::NoDevice { asked: 7, count: 2 }));
}

#[test]
fn a_lost_device_leaves_with_the_first_call_that_meets_the_loss() {
    let (sim, rt) = machine(2, 100);
    let placer = rt.placer(Policy::BestFit);
    let lease = place(&placer, 10).unwrap();
    assert_eq!(lease.device(), DeviceId(0));
    let stream = lease.stream().unwrap();
    sim.lose_device(DeviceId(0));
    // By a call of a pool's user, which the placer does not see.
    assert_eq!(
        rt.device(0).unwrap().alloc(&stream, Request::bytes(MIB)).map(drop),
        Err(MemoryError::DeviceLost { device: DeviceId(0) })
    );
    let next = placer.place(&PlacementRequest::bytes(MIB)).unwrap();
    assert_eq!(next.device(), DeviceId(1));
    let lost = Err(MemoryError::DeviceLost { device: DeviceId(0) });
    assert_eq!(lease.stream().map(drop), lost);
    assert_eq!(lease.alloc(&stream, Request::bytes(MIB)).map(drop), lost);
    assert_eq!(placer.device(0).unwrap().health, Health::Lost);
    let refused = placer.place(&PlacementRequest::bytes(MIB).only([DeviceId(0)])).unwrap_err();
    assert_eq!(why(&refused, 0), RejectReason::Lost);
    let budget = rt.device(0).unwrap().budget().clone();
    drop((lease, stream));
    assert_eq!(budget.used(), 0, "what it held has gone back all the same");
    lose(&sim, 1);
    let error = MemoryError::from(place(&placer, 1).unwrap_err());
    assert_eq!(error, MemoryError::DeviceLost { device: DeviceId(0) }, "none is left");
}

#[test]
fn a_device_that_is_put_back_is_a_new_generation_and_leases_of_the_old_one_are_refused() {
    let (sim, rt) = machine(2, 100);
    let placer = rt.placer(Policy::RoundRobin);
    let pool = |sim: &Sim| {
        let config = PoolConfig::with_budget(Budget::new("a device that is back", 50 * MIB));
        DevicePool::open(sim.driver(), DeviceId(0), config).unwrap()
    };
    assert!(placer.restore(pool(&sim)).is_err(), "it is not lost");
    let old = place(&placer, 10).unwrap();
    lose(&sim, 0);
    let after = Sim::h200(2).symbolic();
    assert_eq!(placer.restore(pool(&after)), Ok(2));
    let new = placer.place(&PlacementRequest::bytes(MIB).only([DeviceId(0)])).unwrap();
    assert_eq!((new.generation(), old.generation()), (2, 1));
    assert!(new.alloc(&new.stream().unwrap(), Request::bytes(MIB)).is_ok());
    assert_eq!(old.stream().map(drop), Err(MemoryError::DeviceLost { device: DeviceId(0) }));
    assert_eq!(
        rt.device(0).unwrap().budget().limit(),
        50 * MIB,
        "the runtime has the new pool too"
    );
    assert_eq!(placer.by_ordinal(DeviceId(0)).unwrap().seen.generation, 2);
    lose(&after, 0);
    assert_eq!(placer.restore(pool(&Sim::h200(1).symbolic())), Ok(3));
}

#[test]
fn devices_are_listed_by_index_and_by_ordinal() {
    let sim = Sim::h200(3).symbolic();
    let chosen = [DeviceId(2), DeviceId(0)];
    let rt = Runtime::builder().driver(sim.driver()).devices(chosen).build().unwrap();
    let placer = rt.placer(Policy::MostFree);
    assert_eq!((placer.count(), placer.devices().len()), (2, 2));
    assert_eq!(placer.device(0).unwrap().pool.device(), DeviceId(2));
    assert_eq!(placer.by_ordinal(DeviceId(0)).unwrap().seen.index, 1);
    assert!(placer.device(2).is_none() && placer.by_ordinal(DeviceId(1)).is_none());
}

#[test]
fn what_other_programs_take_of_a_device_is_seen_at_the_next_sample_and_a_refusal_tells_its_age() {
    let sim = Sim::h200(2).symbolic().capacity(1000 * MIB);
    let rt = |interval| {
        let rt = Runtime::builder().driver(sim.driver()).device_budget(1000 * MIB);
        rt.sample_every(interval).build().unwrap()
    };
    let (always, never) = (rt(Duration::ZERO), rt(Duration::MAX));
    // A neighbour, outside of every budget.
    let neighbour = sim.driver().mem_alloc(DeviceId(0), 900 * MIB).unwrap();
    let request = PlacementRequest::bytes(200 * MIB);
    for _ in 0..3 {
        assert_eq!(
            always.placer(Policy::RoundRobin).place(&request).unwrap().device(),
            DeviceId(1)
        );
    }
    let old = never.placer(Policy::RoundRobin);
    assert_eq!(old.place(&request).unwrap().device(), DeviceId(0), "by a sample from before");
    let refused =
        always.placer(Policy::MostFree).place(&request.clone().only([DeviceId(0)])).unwrap_err();
    assert_eq!(why(&refused, 0), RejectReason::Free { needs: 200 * MIB });
    let PlaceError::Nowhere(nowhere) = &refused else { panic!("{refused}") };
    assert_eq!(
        (nowhere.devices[0].free, nowhere.devices[1].why.clone()),
        (100 * MIB, RejectReason::Excluded)
    );
    assert!(nowhere.devices[0].age < Duration::from_secs(60));
    assert!(refused.to_string().contains("device 0: 100.00 MiB free"), "{refused}");
    let calls = || sim.driver().calls().get(Call::MemoryInfo);
    let before = calls();
    drop((0..100).map(|_| old.place(&PlacementRequest::bytes(MIB)).unwrap()).collect::<Vec<_>>());
    assert_eq!(calls(), before, "asked on the clock, and not for each request");
    // A refusal is never based on an old sample.
    let during = rt(Duration::MAX).placer(Policy::MostFree);
    // SAFETY: 1. nothing has used it.
    #[expect(unsafe_code, reason = "gives a neighbour's memory back")]
    unsafe { sim.driver().mem_free(DeviceId(0), neighbour) }.unwrap();
    assert!(during.place(&PlacementRequest::bytes(950 * MIB).only([DeviceId(0)])).is_ok());
}

#[test]
fn one_thread_asks_the_driver_and_others_go_on_with_what_is_known() {
    let sim = Sim::h200(2).symbolic();
    let rt = Runtime::builder().driver(sim.driver()).device_budget(1000 * MIB);
    let rt = rt.sample_every(Duration::ZERO).build().unwrap();
    let placer = rt.placer(Policy::MostFree);
    let slow = sim.stall(Call::MemoryInfo);
    thread::scope(|scope| {
        let asks = scope.spawn(|| place(&placer, 1));
        assert!(slow.wait_for(1, support::PATIENCE));
        for _ in 0..10 {
            assert!(place(&placer, 1).is_ok(), "while another is in the driver");
        }
        assert_eq!(slow.waiting(), 1);
        drop(slow);
        assert!(asks.join().unwrap().is_ok());
    });
}
