//! Tests of the log of RAPIDS' memory manager.

use aquifer_core::{Action, DeviceId, Recorder, Tag, event::MemoryLocation};
use aquifer_formats::RmmLog;
use std::{env, fs, process, sync::Arc, thread};

const PLACE: MemoryLocation = MemoryLocation::Device(DeviceId(0));

fn tell(recorder: &Recorder, action: Action, address: u64, bytes: u64) {
    let ticket = recorder.ticket();
    recorder.record(ticket, recorder.event(action, PLACE, 3, address, bytes, Tag::NONE));
}

#[test]
fn an_rmm_log_has_rows_as_rmm_writes_them() {
    let path = env::temp_dir().join(format!("aquifer-rmm-{}.csv", process::id()));
    let recorder = Recorder::new(Arc::new(RmmLog::create(&path).unwrap()));
    tell(&recorder, Action::Allocate, 0x7f04_c000_0200, 1000);
    tell(&recorder, Action::Fail, 0, 1 << 40);
    tell(&recorder, Action::Grow, 0x1000, 5);
    tell(&recorder, Action::Free, 0x7f04_c000_0200, 1000);
    tell(&recorder, Action::Complete, 0x7f04_c000_0200, 1000);
    let other = thread::scope(|s| {
        let record = || {
            let host = recorder.event(
                Action::Allocate,
                MemoryLocation::Host(None),
                0,
                0x10,
                16,
                Tag::NONE,
            );
            recorder.record(recorder.ticket(), host);
            let event = recorder.event(Action::Allocate, PLACE, 0, 0x10, 16, Tag::NONE);
            recorder.record(recorder.ticket(), event);
            event.thread
        };
        s.spawn(record).join().unwrap()
    });
    recorder.sink().flush();
    let text = fs::read_to_string(&path).unwrap();
    fs::remove_file(&path).unwrap();
    assert!(text.starts_with("Thread,Time,Action,Pointer,Size,Stream\n") && text.ends_with('\n'));
    let rows: Vec<Vec<&str>> =
        text.lines().skip(1).map(|row| row.splitn(3, ',').collect()).collect();
    let told: Vec<_> = rows.iter().map(|row| row[2]).collect();
    assert_eq!(
        told,
        [
            "allocate,0x7f04c0000200,1000,0x3",
            "allocate failure,(nil),1099511627776,0x3",
            "free,0x7f04c0000200,1000,0x3",
            "allocate,0x10,16,0",
        ]
    );
    let here = rows[0][0];
    assert!(
        rows[..3].iter().all(|row| row[0] == here)
            && rows[3][0] == other.to_string()
            && here != rows[3][0]
    );
    for row in rows {
        let time = row[1].as_bytes();
        assert_eq!((time.len(), time[2], time[5], time[8]), (15, b':', b':', b'.'), "{}", row[1]);
        assert!(
            time.iter().filter(|byte| byte.is_ascii_digit()).count() == 12 && time < &b"24"[..]
        );
    }
}
