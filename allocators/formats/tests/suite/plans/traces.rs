//! Plans of recorded and of generated programs.

use crate::plans::places::tries;
use aquifer_formats::plan::{Plan, PlanBlock};
use aquifer_formats::trace::Trace;
use std::path::Path;

/// Returns the top of a plan of a trace, over the trace's peak of live bytes.
fn over_peak(trace: &Trace, most: u32) -> f64 {
    let plan = Plan::make(&PlanBlock::of_trace(trace), &tries(most)).unwrap();
    assert!(plan.top() >= plan.lower_bound() && plan.lower_bound() >= trace.peak_live);
    let mut file = Vec::new();
    plan.write_to(&mut file).unwrap();
    assert_eq!(Plan::read_from(file.as_slice()).unwrap(), plan);
    plan.top() as f64 / trace.peak_live as f64
}

#[test]
fn plans_of_recorded_programs_are_within_half_a_per_cent_of_the_peak() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    for (name, most) in [("llama_train", 1), ("resnet_train", 1), ("serve_mixed", 10)] {
        let trace = Trace::read(&folder.join(format!("{name}.csv.xz")), None).expect("a trace");
        let ratio = over_peak(&trace, most);
        println!("{name}: {ratio:.6}");
        assert!(ratio <= 1.005, "{name}: {ratio}");
    }
}

#[test]
fn plans_of_generated_programs_are_close_to_the_peak_where_a_close_one_is_known() {
    for (name, bound) in [
        ("growing-kv", 1.005),
        ("phases", 1.005),
        ("idle-streams", 1.005),
        ("steady", 1.005),
        ("edge", 1.01),
    ] {
        let path = format!("made:{name}");
        let trace = Trace::read(path.as_ref(), None).unwrap_or_else(|e| panic!("{name}: {e}"));
        let ratio = over_peak(&trace, 16);
        println!("{name}: {ratio:.6}");
        assert!(ratio <= bound, "{name}: {ratio}");
    }
}
