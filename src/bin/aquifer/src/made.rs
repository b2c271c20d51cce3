//! The list of generated traces.

use aquifer_console::layout::wrap;
use aquifer_formats::trace::made::WORKLOADS;
use serde_json::json;

/// Returns the list of workloads as text or as JSON.
pub(crate) fn list(as_json: bool) -> String {
    if as_json {
        let rows = WORKLOADS.iter().map(|w| json!({ "name": w.name, "about": w.about }));
        return serde_json::Value::from_iter(rows).to_string();
    }
    let mut lines = vec!["aquifer replay made:NAME[,seed=N][,scale=X][,length=X]".to_owned()];
    for workload in &WORKLOADS {
        lines.push(format!("  {}", workload.name));
        lines.extend(wrap(workload.about, 74).into_iter().map(|line| format!("      {line}")));
    }
    lines.push("next  aquifer replay made:steady".to_owned());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_names_every_workload_and_fits_on_a_screen() {
        let text = list(false);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let rows: serde_json::Value = serde_json::from_str(&list(true)).unwrap();
        for (at, workload) in WORKLOADS.iter().enumerate() {
            assert!(text.contains(workload.name));
            assert_eq!(rows[at]["name"], workload.name);
            assert!(!workload.about.is_empty());
        }
    }
}
