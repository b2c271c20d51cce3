//! Tests of the feature `serde`.

use aquifer_core::{
    Action, Budget, DeviceId, Event, OutOfMemory, PoolStats, Tag,
    event::{BlockKind, MemoryLocation},
};
use serde_json::{json, to_value};

#[test]
fn events_are_written_with_the_names_that_traces_use() {
    let mut event = Event {
        at_ns: 5,
        action: Action::Allocate,
        place: MemoryLocation::Device(DeviceId(1)),
        thread: 2,
        stream: 3,
        address: 0x7f00_0000_0000,
        bytes: 512,
        kind: BlockKind::Cached,
        tag: Tag::named("serialized"),
        refused_by: Tag::NONE,
    };
    let expected = json!({
        "at_ns": 5, "action": "allocate", "place": {"device": 1}, "thread": 2, "stream": 3,
        "address": 0x7f00_0000_0000_u64, "bytes": 512, "kind": "cached", "tag": "serialized",
    });
    assert_eq!(to_value(event).unwrap(), expected);
    for kind in BlockKind::ALL {
        assert_eq!(to_value(kind).unwrap(), kind.name());
    }
    (event.place, event.tag) = (MemoryLocation::Host(None), Tag::NONE);
    let written = to_value(event).unwrap();
    assert_eq!((&written["place"], &written["tag"]), (&json!({"host": null}), &json!("untagged")));
}

#[test]
fn statistics_and_figures_are_written_by_their_fields() {
    let mut stats = PoolStats::default();
    (stats.live, stats.peak_physical) = (512, 2 << 20);
    let written = to_value(stats).unwrap();
    assert_eq!((&written["live"], &written["peak_physical"]), (&json!(512), &json!(2 << 20)));
    let budget = Budget::new("serialized", 100);
    let _charge = budget.charge(60).unwrap();
    let written = to_value(budget.figures()).unwrap();
    assert_eq!((&written["name"], &written["used"]), (&json!("serialized"), &json!(60)));
}

#[test]
fn an_out_of_memory_error_is_written_by_its_fields() {
    let mut error = OutOfMemory::new("device 0".into(), 300);
    error.refused = Budget::new("serialized", 100).charge(300).err();
    let written = to_value(error).unwrap();
    assert_eq!((&written["place"], &written["tried"]), (&json!("device 0"), &json!([])));
    let refused = json!({
        "budget": "serialized", "requested": 300, "current": 0, "remaining": 100, "limit": 100,
        "elsewhere": null,
    });
    assert_eq!(written["refused"], refused);
}
