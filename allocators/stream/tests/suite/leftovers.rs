//! Tests that objects whose destruction the driver refused are destroyed later.
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::support::{self, Rig};
use aquifer_driver::{Call, leftovers};

const REFUSED: u32 = 999;

#[test]
fn objects_the_driver_refused_to_destroy_are_counted_and_destroyed_later() {
    let rig = Rig::new(2);
    let s = rig.lease();
    rig.launch(&s);
    s.timeline().fence(s.timeline().open()).unwrap();
    rig.sim.fail(Call::EventDestroy, 1, REFUSED);
    rig.sim.fail_every(Call::StreamDestroy, 1, REFUSED);
    let Rig { sim, pool } = rig;
    drop((s, pool));
    assert_eq!(
        (sim.outstanding().streams, sim.outstanding().events),
        (1, 1),
        "{}",
        sim.outstanding()
    );
    assert_eq!(leftovers::count(&sim.driver()), 2);
    // Creating a stream in any pool retries.
    let other = Rig { pool: aquifer_stream::StreamPool::new(sim.driver(), support::GPU, 1), sim };
    let s = other.lease();
    assert_eq!((other.sim.outstanding().streams, other.sim.outstanding().events), (2, 0));
    assert_eq!(leftovers::count(&other.sim.driver()), 1);
    other.sim.clear_failures();
    drop(s);
    let Rig { sim, pool } = other;
    drop(pool);
    leftovers::sweep(&sim.driver()).unwrap();
    assert_eq!((sim.outstanding().streams, sim.outstanding().events), (0, 0));
    assert_eq!(leftovers::count(&sim.driver()), 0);

    // A lost device has nothing that could be destroyed.
    let rig = Rig::new(1);
    drop(rig.lease());
    rig.sim.lose_device(support::GPU);
    let Rig { sim, pool } = rig;
    drop(pool);
    assert_eq!(leftovers::count(&sim.driver()), 0);
}
