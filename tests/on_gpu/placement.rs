//! Tests of placement over several real GPUs: near existing data, groups on peers, and a draining
//! device. `fleet` covers the rest.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::first_gpu::{RuntimeInTurn, gpu};
use aquifer::{
    DeviceBuffer, Group, Lease, Near, PlaceError, PlacementRequest, Policy, Runtime, Stream, Tag,
    placement::RejectReason,
};

const MIB: u64 = 1 << 20;
/// The limit of each device.
const LIMIT: u64 = 1 << 30;
const LEN: usize = 4 << 20;

fn runtime() -> Option<RuntimeInTurn> {
    let rt = RuntimeInTurn::new(Runtime::builder().device_budget(LIMIT));
    if rt.devices().len() < 2 {
        gpu::skip(format!("{} GPUs, two are needed", rt.devices().len()));
        return None;
    }
    Some(rt)
}

/// Returns numbers that identify their origin.
fn pattern(seed: u32) -> Vec<u32> {
    (0..LEN as u32).map(|i| i.wrapping_mul(0x9e37_79b9) ^ seed).collect()
}

/// Returns a buffer with the pattern, drawn from the lease.
fn filled(lease: &Lease, stream: &Stream, seed: u32) -> DeviceBuffer<u32> {
    let mut buffer = lease.buffer(stream, LEN).unwrap();
    let numbers = pattern(seed);
    stream.scope(|c| c.upload(&numbers, &mut buffer)).unwrap().unwrap();
    buffer
}

fn read(stream: &Stream, buffer: &DeviceBuffer<u32>) -> Vec<u32> {
    let mut back = vec![0; LEN];
    stream.scope(|c| c.download(buffer, &mut back)).unwrap().unwrap();
    back
}

#[test]
fn near_goes_to_the_device_that_has_the_data_and_then_to_its_peers() {
    let Some(rt) = runtime() else { return };
    let (placer, tag) = (rt.placer(Policy::Near), Tag::named("the cache"));
    let there = rt.devices().last().unwrap();
    let _data =
        there.alloc(&there.stream().unwrap(), aquifer::Request::bytes(64 * MIB).tag(tag)).unwrap();
    let place = PlacementRequest::bytes(MIB).near(Near::Data(tag));
    assert_eq!(placer.place(&place).unwrap().device(), there.device());
    let next = placer.place(&place.not_on([there.device()])).unwrap();
    let peers = rt.devices().iter().filter(|pool| pool.info().peers.contains(&there.device()));
    assert!(peers.clone().count() == 0 || peers.clone().any(|pool| pool.device() == next.device()));
}

#[test]
fn a_group_on_peers_is_held_whole_and_a_draining_device_takes_nothing_new() {
    let Some(rt) = runtime() else { return };
    let placer = rt.placer(Policy::MostFree);
    let all = rt.devices();
    let mutual = |pool: &aquifer::DevicePool| {
        all.iter().all(|other| {
            other.device() == pool.device() || pool.info().peers.contains(&other.device())
        })
    };
    let group = Group::of(all.len(), PlacementRequest::bytes(64 * MIB)).on_peers();
    match placer.place_group(&group) {
        Ok(leases) => {
            assert!(all.iter().all(mutual));
            assert_eq!(leases.len(), all.len());
        }
        Err(refused) => assert!(!all.iter().all(mutual), "{refused}"),
    }
    let away = all[0].device();
    let lease = placer.place(&PlacementRequest::bytes(64 * MIB).only([away])).unwrap();
    placer.drain(away).unwrap();
    for _ in 0..8 {
        assert_ne!(placer.place(&PlacementRequest::bytes(MIB)).unwrap().device(), away);
    }
    let Err(PlaceError::Nowhere(refused)) =
        placer.place(&PlacementRequest::bytes(MIB).only([away]))
    else {
        panic!("it drains")
    };
    assert_eq!(refused.devices[0].why, RejectReason::Draining);
    let s = lease.stream().unwrap();
    assert!(read(&s, &filled(&lease, &s, 3)) == pattern(3), "what is leased lives on");
    placer.undrain(away).unwrap();
    assert_eq!(placer.place(&PlacementRequest::bytes(MIB).only([away])).unwrap().device(), away);
}
