//! Tests that an id is valid only in the space and for the generation that created it.

use aquifer_core::{DeviceId, Id, IdSpace};
use std::{
    collections::{HashMap, HashSet},
    thread,
};

/// A kind that implements none of the traits that ids must have.
struct Bare(#[expect(dead_code, reason = "only its lack of traits matters")] Vec<u8>);

#[test]
fn an_id_resolves_to_its_slot_and_generation_in_its_own_space() {
    let space = IdSpace::<Bare>::new();
    for (index, generation) in [(0, 0), (0, 1), (7, 3), (u32::MAX, u32::MAX)] {
        let id = space.mint(index, generation);
        assert_eq!(space.resolve(id), Some((index, generation)));
        assert_eq!(id.index(), index);
        assert_eq!(id.to_string(), index.to_string());
    }
}

#[test]
fn a_space_refuses_an_id_of_another() {
    let (ours, theirs) = (IdSpace::<Bare>::new(), IdSpace::<Bare>::default());
    let (mine, other) = (ours.mint(3, 1), theirs.mint(3, 1));
    assert_eq!(theirs.resolve(mine), None);
    assert_eq!(ours.resolve(other), None);
    assert_ne!(mine, other, "the same slot and generation");
}

#[test]
fn generations_of_one_slot_are_told_apart() {
    let space = IdSpace::<Bare>::new();
    let (old, new) = (space.mint(3, 1), space.mint(3, 2));
    assert_ne!(old, new);
    assert_eq!((space.resolve(old), space.resolve(new)), (Some((3, 1)), Some((3, 2))));
}

#[test]
fn ids_are_keys_whatever_they_name() {
    let space = IdSpace::<Bare>::new();
    let mut names: HashMap<Id<Bare>, u32> = (0..100).map(|i| (space.mint(i, i % 3), i)).collect();
    let copied: Id<Bare> = space.mint(42, 0);
    let copy = copied;
    assert_eq!(names.remove(&copied), Some(42));
    assert_eq!(names.remove(&copy), None, "a copy is the same id");
    assert_eq!(names.len(), 99);
    assert!(format!("{copy:?}").ends_with(".42.0)"));
}

#[test]
fn spaces_made_by_many_threads_are_all_distinct() {
    let each = if cfg!(miri) { 20 } else { 200 };
    let spaces: Vec<IdSpace<Bare>> = thread::scope(|scope| {
        let makers: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| (0..each).map(|_| IdSpace::new()).collect::<Vec<_>>()))
            .collect();
        makers.into_iter().flat_map(|maker| maker.join().unwrap()).collect()
    });
    let firsts: HashSet<Id<Bare>> = spaces.iter().map(|space| space.mint(0, 0)).collect();
    assert_eq!(firsts.len(), 8 * each);
}

/// An id carries no permission: an id of an object that is bound to a thread may be sent.
#[test]
fn an_id_can_go_where_what_it_names_cannot() {
    fn goes_anywhere<T: Send + Sync + Copy + 'static>(_: T) {}
    goes_anywhere(IdSpace::<std::rc::Rc<()>>::new().mint(0, 0));
}

#[test]
fn a_device_is_named_by_its_ordinal() {
    assert_eq!(DeviceId(3).to_string(), "device 3");
    assert!(DeviceId(0) < DeviceId(1));
}
