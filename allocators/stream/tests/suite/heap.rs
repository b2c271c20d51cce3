//! Tests that recording uses allocates nothing from the host's heap in the steady state.

use crate::{counting::asked, support::Rig};
use aquifer_driver::Access;
use aquifer_stream::{StreamLifetime, UseList};

#[test]
fn a_steady_state_of_uses_by_two_streams_allocates_nothing_on_the_heap() {
    let rig = Rig::new(4);
    let home = rig.adopt(rig.foreign(), StreamLifetime::Retired).unwrap();
    // There is then nothing to wait for, since the driver's calls are not counted.
    home.clone().retire().unwrap();
    let (u, v) = (rig.lease(), rig.lease());
    let (home, u, v) = (home.timeline(), u.timeline(), v.timeline());
    let kept = UseList::new();
    let prepared = asked(|| kept.prepare(1, home, u, Access::Read).unwrap().finish().unwrap());
    let at_home = asked(|| drop(kept.prepare(1, home, home, Access::Read).unwrap()));
    let recorded = asked(|| kept.record(home, v, Access::Read).unwrap());
    let freed = asked(|| {
        let mut uses = UseList::new();
        uses.record(home, u, Access::Read).unwrap();
        uses.prepare(1, home, v, Access::Read).unwrap().finish().unwrap();
        uses.lend(1, home, v, Access::Read).unwrap();
        let mut uses = uses.take();
        uses.forget_done();
        assert_eq!(uses.stamped().count(), 2);
        uses.clear();
    });
    assert_eq!((prepared, at_home, recorded, freed), (0, 0, 0, 0));
    // The control: the allocator counts.
    assert_eq!(asked(|| drop(std::hint::black_box(Box::new(1)))), 100);
}

#[test]
fn a_list_is_as_large_as_a_pointer() {
    assert_eq!(size_of::<UseList>(), size_of::<usize>());
}
