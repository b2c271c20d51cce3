//! Tests of groups and waits over devices of others, by a model whose figures may be outdated.

use super::*;
use aquifer::{
    budget::Reservation,
    placement::{DeviceSource, NoFit},
};
use proptest::prelude::*;
use std::{cell::RefCell, rc::Rc};

/// What happened at a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Held(usize),
    Refused(usize),
    Released(usize),
}

/// Devices that show more free bytes than they have.
struct Model {
    shown: Vec<u64>,
    total: u64,
    peers: Vec<Vec<DeviceId>>,
    room: Rc<RefCell<Vec<u64>>>,
    steps: Rc<RefCell<Vec<Step>>>,
}

struct Hold {
    index: usize,
    bytes: u64,
    room: Rc<RefCell<Vec<u64>>>,
    steps: Rc<RefCell<Vec<Step>>>,
}

impl Model {
    /// Devices of islands of this size are peers.
    fn new(room: &[u64], shown: &[u64], island: usize) -> Self {
        let islands = |at: usize| {
            let first = at / island * island;
            (first..(first + island).min(room.len())).map(|at| DeviceId(at as u32)).collect()
        };
        Self {
            shown: shown.to_vec(),
            total: 100,
            peers: (0..room.len()).map(islands).collect(),
            room: Rc::new(RefCell::new(room.to_vec())),
            steps: Rc::default(),
        }
    }
}

impl DeviceSource for Model {
    type Held = Hold;

    fn candidates(&self) -> Vec<Candidate<'_>> {
        self.peers
            .iter()
            .enumerate()
            .map(|(at, peers)| {
                let mut device =
                    Candidate::new(at, DeviceId(at as u32), self.shown[at], self.total);
                device.peers = peers;
                device
            })
            .collect()
    }

    fn hold(&self, index: usize, bytes: u64) -> Result<Hold, RejectReason> {
        let mut room = self.room.borrow_mut();
        let Some(left) = room[index].checked_sub(bytes) else {
            self.steps.borrow_mut().push(Step::Refused(index));
            return Err(RejectReason::Free { needs: bytes });
        };
        room[index] = left;
        self.steps.borrow_mut().push(Step::Held(index));
        Ok(Hold { index, bytes, room: self.room.clone(), steps: self.steps.clone() })
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.room.borrow_mut()[self.index] += self.bytes;
        self.steps.borrow_mut().push(Step::Released(self.index));
    }
}

fn policies() -> Vec<Policy> {
    vec![
        Policy::MostFree,
        Policy::RoundRobin,
        Policy::LeastLoaded,
        Policy::BestFit,
        Policy::Affinity,
        Policy::weighted([(DeviceId(1), 3), (DeviceId(2), 0)]),
        Policy::custom("the last", |_, devices| devices.iter().rev().map(|d| d.device).collect()),
    ]
}

/// Checks that each attempt held in the order of indices, and released all in the reverse order
/// when it was refused.
fn check_attempts(steps: &[Step]) {
    let mut held: Vec<usize> = Vec::new();
    let mut steps = steps.iter();
    while let Some(step) = steps.next() {
        match step {
            Step::Held(index) => {
                assert!(held.last().is_none_or(|last| last <= index), "{held:?}, then {index}");
                held.push(*index);
            }
            Step::Refused(_) => {
                while let Some(index) = held.pop() {
                    assert_eq!(steps.next(), Some(&Step::Released(index)));
                }
            }
            Step::Released(index) => panic!("{index} was released without a refusal"),
        }
    }
}

proptest! {
    #[test]
    fn a_group_is_held_exactly_if_its_devices_have_the_room_and_else_nothing_is(
        devices in prop::collection::vec((0_u64..5, 0_u64..4), 1..8),
        island in 1_usize..5,
        shards in 1_usize..8,
        (on_peers, packed) in any::<(bool, bool)>(),
        policy in 0_usize..7,
        turn in 0_u64..9,
    ) {
        let room: Vec<u64> = devices.iter().map(|(room, _)| *room).collect();
        let shown: Vec<u64> = devices.iter().map(|(room, more)| room + more).collect();
        let model = Model::new(&room, &shown, island);
        let mut group = Group::of(shards, PlacementRequest::bytes(1).key(turn));
        group = if on_peers { group.on_peers() } else { group };
        group = if packed { group.packed() } else { group };
        let fits: Vec<u64> = room.iter().map(|&room| if packed { room } else { room.min(1) }).collect();
        let together = |fits: &[u64]| fits.iter().sum::<u64>() >= shards as u64;
        let exists = if on_peers { fits.chunks(island).any(together) } else { together(&fits) };
        let placed = policies()[policy].place_group_in(&model, &group, turn);
        check_attempts(&model.steps.borrow());
        prop_assert_eq!(placed.is_ok(), exists, "{:?}", placed.err());
        if let Ok(placed) = placed {
            prop_assert_eq!(placed.len(), shards);
            let mut at: Vec<usize> = placed.iter().map(|(device, _)| device.0 as usize).collect();
            prop_assert!(placed.iter().all(|(device, hold)| device.0 as usize == hold.index));
            prop_assert!(!on_peers || at.iter().all(|other| other / island == at[0] / island));
            at.dedup();
            let devices = at.len();
            at.sort_unstable();
            at.dedup();
            prop_assert_eq!(at.len(), devices, "shards of a device stand together");
            prop_assert!(packed || devices == shards);
            let held: u64 = room.iter().zip(&*model.room.borrow()).map(|(all, left)| all - left).sum();
            prop_assert_eq!(held, shards as u64);
        }
        prop_assert_eq!(&*model.room.borrow(), &room, "all is given back");
    }
}

/// The devices of a placer as devices of others.
struct OfPlacer(Placer);

impl DeviceSource for OfPlacer {
    type Held = Reservation;

    fn candidates(&self) -> Vec<Candidate<'_>> {
        self.0.devices().map(|device| device.seen).collect()
    }

    fn hold(&self, index: usize, bytes: u64) -> Result<Reservation, RejectReason> {
        let device = self.0.device(index).ok_or(RejectReason::NotNamed)?;
        device.pool.budget().reserve(bytes).map_err(RejectReason::Budget)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_source_of_the_devices_of_a_placer_gets_the_same_choice(
        free in prop::collection::vec(0_u64..5, 1..7),
        requests in prop::collection::vec((1_usize..5, 1_u64..4, any::<(bool, bool)>()), 1..6),
        policy in 0_usize..7,
    ) {
        let (_, rt) = machine(free.len() as u32, 4);
        let placer = rt.placer(policies().swap_remove(policy));
        let on = |at: usize| PlacementRequest::bytes((4 - free[at]) * MIB).only([DeviceId(at as u32)]);
        let full: Vec<_> =
            (0..free.len()).filter(|at| free[*at] < 4).map(|at| placer.place(&on(at)).unwrap()).collect();
        let (source, placer) = (OfPlacer(placer), rt.placer(policies().swap_remove(policy)));
        for (turn, (shards, mib, (packed, on_peers))) in requests.into_iter().enumerate() {
            let group = Group::of(shards, PlacementRequest::bytes(mib * MIB).key(mib));
            let group = if packed { group.packed() } else { group };
            let group = if on_peers { group.on_peers() } else { group };
            let there = policies()[policy].place_group_in(&source, &group, turn as u64);
            let there = there.map(|held| held.iter().map(|(device, _)| device.0).collect::<Vec<_>>());
            let here = placer.place_group(&group).map(|leases| devices(&leases));
            match (there, here) {
                (Err(PlaceError::Nowhere(there)), Err(PlaceError::Nowhere(here))) => {
                    let free = |refused: &NoFit| -> Vec<_> {
                        refused.devices.iter().map(|d| (d.device, d.free, d.why.clone())).collect()
                    };
                    prop_assert_eq!(free(&there), free(&here));
                }
                (there, here) => prop_assert_eq!(there, here),
            }
        }
        drop(full);
        prop_assert!(rt.devices().iter().all(|pool| pool.budget().used() == 0));
    }
}

#[test]
fn a_wait_ends_at_its_deadline_and_at_once_where_there_can_never_be_room() {
    let model = Model::new(&[3, 0, 9], &[3, 5, 9], 3);
    let group = |shards, bytes| Group::of(shards, PlacementRequest::bytes(bytes));
    let soon = Instant::now() + Duration::from_millis(30);
    let refused = Policy::MostFree.place_group_in_by(&model, &group(2, 5), 0, Some(soon));
    let refused = refused.map(drop).unwrap_err();
    assert!(Instant::now() >= soon);
    assert_eq!(why(&refused, 0), RejectReason::Free { needs: 5 });
    assert_eq!(why(&refused, 1), RejectReason::Free { needs: 5 }, "by its own word");
    assert_eq!(why(&refused, 2), RejectReason::Alone);
    assert_eq!(*model.room.borrow(), [3, 0, 9]);
    let forever = None;
    for (shards, bytes) in [(4, 1), (1, 101), (0, 1), (1, 0)] {
        assert!(
            Policy::MostFree.place_group_in_by(&model, &group(shards, bytes), 0, forever).is_err()
        );
    }
    let none = PlacementRequest::bytes(1).only([]);
    assert!(Policy::MostFree.place_in_by(&model, &none, 0, forever).is_err());
}

#[test]
fn a_policy_that_panics_holds_nothing_and_ends_the_wait() {
    let model = Model::new(&[3; 2], &[3; 2], 2);
    let panics = Policy::custom("a test", |_, _| panic!("on purpose"));
    let place = PlacementRequest::bytes(1);
    let refused = panics.place_in_by(&model, &place, 0, None).map(drop).unwrap_err();
    assert_eq!(refused, PlaceError::PolicyPanicked { policy: "a test" });
    assert!(model.steps.borrow().is_empty());
}

/// A source where a device gets room while the group waits at another.
struct Moving(Model);

impl DeviceSource for Moving {
    type Held = Hold;

    fn candidates(&self) -> Vec<Candidate<'_>> {
        let mut devices = self.0.candidates();
        devices.iter_mut().for_each(|device| device.free = self.0.room.borrow()[device.index]);
        devices
    }

    fn hold(&self, index: usize, bytes: u64) -> Result<Hold, RejectReason> {
        self.0.hold(index, bytes)
    }

    fn hold_by(
        &self,
        index: usize,
        bytes: u64,
        deadline: Instant,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Hold, RejectReason> {
        assert_eq!(index, 1, "that with the most of those that lack");
        self.0.room.borrow_mut()[0] = 8;
        while go_on() {
            assert!(Instant::now() < deadline);
            thread::yield_now();
        }
        Err(RejectReason::Free { needs: bytes })
    }
}

#[test]
fn a_group_leaves_a_queue_when_there_is_room_without_it() {
    let mut model = Model::new(&[1, 4, 9], &[1, 4, 9], 3);
    model.total = 10;
    let group = Group::of(2, PlacementRequest::bytes(8));
    let placed = Policy::MostFree.place_group_in_by(&Moving(model), &group, 0, late()).unwrap();
    let devices: Vec<u32> = placed.iter().map(|(device, _)| device.0).collect();
    assert_eq!(devices, [2, 0]);
}

/// Returns a deadline that no test reaches.
fn late() -> Option<Instant> {
    Instant::now().checked_add(Duration::from_secs(60))
}
