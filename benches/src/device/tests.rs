use super::*;
use crate::console::place::DeviceChoice;
use aquifer_driver::sim::Sim;

fn place() -> Place {
    Place::choose(DeviceChoice::Sim).unwrap()
}

/// Returns a simulated GPU that is treated as a real one, so that there are rows of the peers and
/// of the driver's calls.
fn as_if_real(sim: &Sim) -> Place {
    let driver = sim.driver();
    let info = driver.device_info(aquifer_driver::DeviceId(0)).unwrap();
    Place::Cuda { driver, info }
}

fn measured<'a>(place: &'a Place, only: Option<&str>, driver: bool) -> DeviceBench<'a> {
    let mut bench = DeviceBench::new(place, Pace::QUICK, only, driver).unwrap();
    bench.measure(&mut ProgressLine::silent()).unwrap();
    bench
}

fn names(bench: &DeviceBench<'_>) -> Vec<String> {
    groups().iter().flat_map(|group| (group.names)(bench)).collect()
}

#[test]
fn sizes_are_written_as_people_name_them() {
    let table = [
        (256, "256 B"),
        (4 << 10, "4 KiB"),
        (1 << 20, "1 MiB"),
        (64 << 20, "64 MiB"),
        (4 << 30, "4 GiB"),
    ];
    for (bytes, name) in table {
        assert_eq!(size(bytes), name);
    }
}

#[test]
fn no_two_rows_have_one_name() {
    let place = place();
    let bench = DeviceBench::new(&place, Pace::QUICK, None, true).unwrap();
    let mut names = names(&bench);
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
}

#[test]
fn a_pattern_chooses_rows_in_either_case_and_measures_no_others() {
    let place = place();
    let bench = measured(&place, Some("PAIR 1 m"), false);
    let rows: Vec<_> = bench.sheet.rows.iter().map(|row| row.name.as_str()).collect();
    assert_eq!(rows, ["pair 1 MiB"]);
    // The peer is the reference of the same run.
    let peer = bench.sheet.rows[0].peer.as_ref().unwrap();
    assert_eq!(peer.name, "malloc 64 B");
    assert!(peer.ns > 0.0);
}

#[test]
fn a_row_over_another_has_that_one_as_its_peer() {
    let place = place();
    let bench = measured(&place, Some("threads, each, over"), false);
    let [row] = &bench.sheet.rows[..] else { panic!("{:?}", bench.sheet.rows) };
    assert_eq!(
        (row.name.as_str(), row.peer.as_ref().unwrap().name.as_str()),
        ("16 threads, each, over one thread", "1 thread")
    );
    assert!(row.ratio() > Some(0.0));
}

#[test]
fn a_pattern_that_no_row_has_is_a_mistake() {
    let place = place();
    let mut bench = DeviceBench::new(&place, Pace::QUICK, Some("pear"), false).unwrap();
    let mistake = bench.measure(&mut ProgressLine::silent()).unwrap_err();
    assert!(
        mistake.to_string().starts_with("no row's name contains 'pear'; there are pair 1 GiB;"),
        "{mistake}"
    );
}

/// Runs all rows but those that take most of the time.
#[test]
fn on_a_gpu_the_drivers_allocator_stands_beside_each_row() {
    let sim = Sim::h200(1).symbolic();
    sim.oracle(false);
    let place = as_if_real(&sim);
    for pattern in [
        "pair 64",
        "batch of 64, 4 KiB",
        "random up to 64",
        "2 threads",
        "grow",
        "trim",
        "first",
        "past 1,000 holes",
    ] {
        let bench = measured(&place, Some(pattern), false);
        assert!(bench.sheet.failures.is_empty(), "{:?}", bench.sheet.failures);
        assert!(!bench.sheet.rows.is_empty(), "{pattern}");
        for row in bench.sheet.rows.iter().filter(|row| !row.name.starts_with("malloc")) {
            assert_eq!(
                row.peer.as_ref().map(|peer| peer.name.as_str()),
                Some(source::ASYNC),
                "{row:?}"
            );
        }
    }
    // Pools and streams are dropped, with all that they held.
    let left = sim.outstanding();
    assert_eq!(left.to_string(), Sim::h200(1).outstanding().to_string());
}

#[test]
fn the_drivers_calls_have_rows_for_each_handle_and_leave_nothing() {
    let sim = Sim::h200(1).symbolic();
    sim.oracle(false);
    let place = as_if_real(&sim);
    let bench = measured(&place, Some("driver"), true);
    assert!(bench.sheet.failures.is_empty(), "{:?}", bench.sheet.failures);
    let expected: Vec<_> =
        names(&bench).into_iter().filter(|name| name.starts_with("driver")).collect();
    let mut measured: Vec<_> = bench.sheet.rows.iter().map(|row| row.name.clone()).collect();
    assert_eq!(measured.len(), expected.len());
    measured.retain(|name| !expected.contains(name));
    assert!(measured.is_empty(), "{measured:?}");
    assert_eq!(sim.outstanding().to_string(), Sim::h200(1).outstanding().to_string());
}

#[test]
fn a_device_without_room_leaves_rows_out_and_says_why() {
    let sim = Sim::h200(1).symbolic().capacity(1 << 30);
    sim.oracle(false);
    let place = as_if_real(&sim);
    let bench = measured(&place, Some("1 GiB"), false);
    assert!(bench.sheet.rows.is_empty() && bench.sheet.failures.is_empty());
    let left: Vec<_> = bench.sheet.left_out.iter().map(|left| left.row.as_str()).collect();
    assert_eq!(left, ["pair 1 GiB", "grow by 1 GiB", "trim 1 GiB"]);
    assert_eq!(bench.sheet.left_out[0].why, "needs 2.00 GiB of 819.20 MiB");
}

#[test]
fn what_the_driver_refuses_is_counted_and_told() {
    let sim = Sim::h200(1).symbolic();
    sim.oracle(false);
    let place = as_if_real(&sim);
    let mut bench =
        DeviceBench::new(&place, Pace::QUICK, Some("batch of 64, 4 KiB"), false).unwrap();
    sim.fail_every(aquifer_driver::Call::PoolAlloc, 2, 2);
    bench.measure(&mut ProgressLine::silent()).unwrap();
    let [failure] = &bench.sheet.failures[..] else { panic!("{:?}", bench.sheet.failures) };
    assert_eq!(failure.row, "batch of 64, 4 KiB (peer)");
    assert!(failure.count > 32 && failure.said.contains("cuMemAllocFromPoolAsync"), "{failure:?}");
    assert_eq!(bench.sheet.rows.len(), 1, "the row is there all the same");
}

#[test]
fn rows_that_are_missing_because_of_an_error_are_named() {
    let sim = Sim::h200(1).symbolic();
    sim.oracle(false);
    let place = as_if_real(&sim);
    let mut bench = DeviceBench::new(&place, Pace::QUICK, Some("1 GiB"), false).unwrap();
    sim.fail_every(aquifer_driver::Call::PoolCreate, 1, 2);
    bench.measure(&mut ProgressLine::silent()).unwrap();
    let rows: Vec<_> = bench.sheet.failures.iter().map(|failure| failure.row.as_str()).collect();
    assert_eq!(rows, ["pair 1 GiB", "grow by 1 GiB; trim 1 GiB"]);
    assert!(bench.sheet.rows.is_empty());
}
