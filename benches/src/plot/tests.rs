//! Pictures as a viewer reads them: XML, and text at places.

use super::*;
use crate::row::{Row, Unit};
use roxmltree::{Document, Node};
use serde_json::{Value, json};

/// A run as `bench --json` prints it.
fn run(rows: Value) -> String {
    json!({
        "bench": "device", "device": "sim", "device_name": "NVIDIA H200 (simulated)",
        "driver": "simulated, CUDA 13.0", "driver_release": null, "host_cpu": "a processor",
        "host_cpus": 2, "date": "2026-11-21T12:16:43Z", "version": "0.1.0", "quick": false,
        "note": "two builds beside it", "rows": rows,
    })
    .to_string()
}

fn row(name: &str, value: f64, peer: Option<(&str, f64)>) -> Value {
    json!({
        "name": name, "value": value, "unit": "ns/pair",
        "peer": peer.map(|peer| peer.0), "peer_value": peer.map(|peer| peer.1),
    })
}

/// Rows of each kind: bars with and without a peer, other units, an interval, and two curves.
fn rows() -> Value {
    let mut rows = vec![
        row("malloc pair 64 B", 8.0, None),
        row("growth & <trim>", 40_000.0, Some(("the driver's \"own\"", 12.5))),
        json!({"name": "waste", "value": 0.0, "unit": "%", "peer": null, "peer_value": null}),
        json!({"name": "region", "value": 35.0, "unit": "GB/s", "peer": "cuMemHostAlloc", "peer_value": 2.5}),
        json!({"name": "on adds", "value": -0.25, "unit": "ns/pair", "interval": [-0.5, 0.125]}),
        json!({"name": "never ended", "value": null, "unit": "µs", "peer": "p", "peer_value": null}),
    ];
    for (threads, own) in [("1 thread", 20.0), ("2 threads", 11.0), ("16 threads", 1_500.0)] {
        rows.push(row(&format!("{threads}, 4 KiB, over all"), own, Some(("malloc", own * 2.0))));
        rows.push(row(&format!("{threads}, 1 MiB, over all"), own * 3.0, None));
    }
    Value::from(rows)
}

fn drawn(rows: Value) -> String {
    picture(&[BenchRun::parse(&run(rows)).unwrap()]).unwrap()
}

/// A text, the place where it begins and the place where it ends at most.
struct Written {
    text: String,
    from: (f64, f64),
    to: f64,
}

/// Every text of a picture, which must be XML, and the picture's size.
fn texts(svg: &str) -> (Vec<Written>, [f64; 2]) {
    let document = Document::parse(svg).unwrap();
    let number = |node: &Node<'_, '_>, name: &str| -> f64 {
        node.attribute(name).unwrap_or_else(|| panic!("no {name}")).parse().unwrap()
    };
    let texts = document.descendants().filter(|node| node.has_tag_name("text")).map(|node| {
        let text = node.text().unwrap().trim().to_owned();
        // The widest monospaced fonts have 0.61 of their size.
        let width = label::columns(&text) as f64 * number(&node, "font-size") * 0.61;
        let x = number(&node, "x");
        let from = match node.attribute("text-anchor").unwrap() {
            "start" => x,
            "middle" => x - width / 2.0,
            other => panic!("{other}"),
        };
        Written { text, from: (from, number(&node, "y")), to: from + width }
    });
    let root = document.root_element();
    (texts.collect(), [number(&root, "width"), number(&root, "height")])
}

/// The texts one after another.
fn words(svg: &str) -> String {
    texts(svg).0.into_iter().map(|written| written.text).collect::<Vec<_>>().join("\n")
}

fn assert_inside(svg: &str) {
    let (texts, [width, height]) = texts(svg);
    for Written { text, from, to } in texts {
        assert!(from.0 >= 0.0 && to <= width, "{text:?}: {from:?} to {to} of {width}");
        assert!(from.1 >= 8.0 && from.1 + 8.0 <= height, "{text:?}: {from:?} of {height}");
    }
}

/// Checks that a row's name and figures stand in the picture: as they are for bars, and as the
/// name of a curve and a column of the table for curves.
fn assert_told(row: &Row, words: &str) {
    let has = |text: &str| assert!(words.contains(text), "no {text:?} in {words}");
    let has_line = |text: &str| assert!(words.lines().any(|line| line == text), "{text:?}");
    if words.lines().any(|line| line == shown(&row.name)) {
        has(&shown(&row.name));
    } else {
        // Its parts stand apart.
        let (quantity, name) = row.name.split_once(", ").unwrap();
        has_line(quantity.split(' ').next().unwrap());
        has_line(name);
    }
    has(&bars::figure(row.unit, row.ns));
    if let Some(peer) = &row.peer {
        has(&bars::figure(row.unit, peer.ns));
        has(&shown(&peer.name));
    }
}

#[test]
fn every_row_is_in_the_picture_with_its_name_and_its_figures() {
    let svg = drawn(rows());
    let words = words(&svg);
    let run = BenchRun::parse(&run(rows())).unwrap();
    assert_eq!(run.rows.len(), 12);
    run.rows.iter().for_each(|row| assert_told(row, &words));
    for text in [
        "aquifer bench device, without a GPU",
        "NVIDIA H200 (simulated), 2 of a processor, 2026-11-21T12:16:43Z, aquifer 0.1.0",
        "two builds beside it",
        "8.00 ns/pair",
        "40.0 µs/pair · 3200×",
        "12.5 ns/pair · the driver's \"own\"",
        "35.0 GB/s · 0.071×",
        "-0.25 ns/pair [-0.50 ns/pair … 0.12 ns/pair]",
        "no value",
        "ns/pair over threads, lower is better, logarithmic axis",
        "GB/s, higher is better",
        "beside malloc, dashed",
        "1.50 µs/pair · 0.500×",
    ] {
        assert!(words.contains(text), "no {text:?} in\n{words}");
    }
    assert_inside(&svg);
}

#[test]
fn a_picture_of_a_report_is_that_of_its_json() {
    let report = crate::run(
        &crate::Benchmark::Budget,
        &crate::RowSelection { only: Some("level".to_owned()), quick: true },
    )
    .unwrap();
    let run = BenchRun::parse(&report.to_json()).unwrap();
    assert_eq!(run.row_count(), report.rows.len());
    assert!(run.row_count() > 4);
    let words = words(&picture(&[run]).unwrap());
    for row in &report.rows {
        // Six digits are kept, of which three are written, so the last of them may differ.
        let told = row.unit.of(row.unit.ns(row.unit.value(row.ns)));
        assert!(words.contains(&told), "{row:?}\n{words}");
    }
}

#[test]
fn a_run_on_a_gpu_names_it_with_its_driver() {
    let mut value: Value = serde_json::from_str(&run(rows())).unwrap();
    for (field, text) in [
        ("device", "cuda:0"),
        ("device_name", "NVIDIA H200 (cuda:0)"),
        ("driver", "CUDA 13.0"),
        ("driver_release", "580.159.03"),
    ] {
        value[field] = json!(text);
    }
    let words = words(&picture(&[BenchRun::parse(&value.to_string()).unwrap()]).unwrap());
    for text in [
        "aquifer bench device: NVIDIA H200 (cuda:0)",
        "CUDA 13.0, release 580.159.03, 2 of a processor",
    ] {
        assert!(words.contains(text), "no {text:?} in\n{words}");
    }
}

#[test]
fn the_same_run_gives_the_same_bytes() {
    assert_eq!(drawn(rows()), drawn(rows()));
    let spaced = run(rows()).replace(':', " :\n ");
    let spaced = BenchRun::parse(
        &spaced.replace("12 :\n 16 :\n 43", "12:16:43").replace("device :\n", "device:"),
    )
    .unwrap();
    assert_eq!(picture(&[spaced]).unwrap(), drawn(rows()), "how JSON is laid out does not matter");
}

#[test]
fn hostile_text_stays_text_and_inside_the_picture() {
    let long = "W".repeat(3_000);
    let names = [
        "</text><script>alert(1)</script>",
        "&amp;&#0;&bogus;",
        "a\u{0}b\u{1b}[31mc\u{7f}\u{85}\u{fffe}",
        "\u{202e}desrever\u{2066}",
        "漢字が続く長い名前、".repeat(30).as_str(),
        "",
        "   ",
        "]]> <!-- --> <?xml?>",
        long.as_str(),
    ]
    .map(str::to_owned);
    let bars = names.iter().map(|name| row(name, 5.0, Some((name, 4.0))));
    // As curves too: over threads, with a peer of that name.
    let curve = |name: &String| {
        let name = name.clone();
        [1, 2, 4].map(|threads| row(&format!("{threads} threads, {name}"), 5.0, Some((&name, 4.0))))
    };
    let rows: Vec<Value> = bars.chain(names.iter().flat_map(curve)).collect();
    let count = rows.len();
    let text = run(Value::from(rows));
    let mut value: Value = serde_json::from_str(&text).unwrap();
    for field in ["bench", "device_name", "driver", "host_cpu", "date", "version", "note"] {
        value[field] = json!(names.concat());
    }
    let run = BenchRun::parse(&value.to_string()).unwrap();
    assert_eq!(run.row_count(), count);
    let svg = picture(&[run]).unwrap();
    let document = Document::parse(&svg).unwrap();
    let tags = ["svg", "rect", "polygon", "polyline", "circle", "text"];
    for node in document.descendants().filter(Node::is_element) {
        assert!(tags.contains(&node.tag_name().name()), "{:?}", node.tag_name());
    }
    assert_inside(&svg);
    let joined: String = words(&svg).split_whitespace().collect();
    for name in &names {
        let text: String = shown(name).split_whitespace().collect();
        // The bar, its peer, the curve and its peer.
        assert!(joined.matches(&text).count() >= 4, "{name:?}");
    }
}

#[test]
fn the_picture_has_a_background_of_its_own() {
    let svg = drawn(rows());
    let document = Document::parse(&svg).unwrap();
    let root = document.root_element();
    let first = root.first_element_child().unwrap();
    assert_eq!((first.tag_name().name(), first.attribute("fill")), ("rect", Some("#FFFFFF")));
    for side in ["width", "height"] {
        assert_eq!(first.attribute(side), root.attribute(side));
    }
}

#[test]
fn curves_are_told_apart_without_colour() {
    let rows = (0..8).flat_map(|curve| {
        [1, 2, 4].map(|threads| row(&format!("{threads} threads, no. {curve}"), 5.0, None))
    });
    let svg = drawn(rows.collect());
    let plain: Vec<_> = {
        let document = Document::parse(&svg).unwrap();
        let table = document.descendants().filter(|node| {
            // Marks of the table stand left of all names.
            let left = |at: &str| node.attribute(at).and_then(|x| x.parse::<i32>().ok());
            let first = node.attribute("points").and_then(|points| points.split(',').next());
            let x = left("cx").or_else(|| first.and_then(|x| x.parse().ok()));
            x.is_some_and(|x| (MARGIN..MARGIN + 14).contains(&x)) && !node.has_tag_name("text")
        });
        table
            .map(|node| {
                let points = node.attribute("points").unwrap_or("").split(' ');
                let mut corners: Vec<_> =
                    points.filter_map(|point| point.split_once(',')).collect();
                let y: Vec<i32> = corners.iter().map(|(_, y)| y.parse().unwrap()).collect();
                corners.sort_unstable();
                let is_hollow = node.attribute("fill") == Some("none");
                let rise = y.windows(2).map(|y| (y[1] - y[0]).signum()).collect::<Vec<_>>();
                format!("{} {is_hollow} {} {rise:?}", node.tag_name().name(), corners.len())
            })
            .collect()
    };
    // Crosses are two lines each.
    assert_eq!(plain.len(), 10, "{plain:?}");
    let distinct: std::collections::BTreeSet<_> = plain.iter().collect();
    assert!(distinct.len() >= 8, "{plain:?}");
}

#[test]
fn several_runs_stand_one_below_the_other() {
    let one = BenchRun::parse(&run(json!([row("first", 5.0, None)]))).unwrap();
    let two = BenchRun::parse(&run(json!([row("second", 5.0, None)]))).unwrap();
    let svg = picture(&[one, two]).unwrap();
    let (texts, _) = texts(&svg);
    let y = |text: &str| texts.iter().find(|written| written.text == text).unwrap().from.1;
    assert!(y("second") > y("first") + 40.0);
    assert_inside(&svg);
}

#[test]
fn a_run_without_rows_gives_no_picture() {
    let empty = BenchRun::parse(&run(json!([]))).unwrap();
    assert!(matches!(picture(&[empty]), Err(PlotError::NoRow)));
    assert!(matches!(picture(&[]), Err(PlotError::NoRow)));
    let mut run = BenchRun::parse(&run(rows())).unwrap();
    run.select("REGION");
    assert_eq!(run.row_count(), 1);
    run.select("no such row");
    assert!(matches!(picture(&[run]), Err(PlotError::NoRow)));
}

#[test]
fn what_is_not_a_run_is_refused_with_the_field() {
    /// What is wrong in the JSON of a run.
    type Change = fn(&mut Value);
    let with = |change: Change| {
        let mut value: Value = serde_json::from_str(&run(rows())).unwrap();
        change(&mut value);
        BenchRun::parse(&value.to_string()).map(drop).unwrap_err().to_string()
    };
    let table: [(Change, &str); 12] = [
        (|value| value["rows"] = json!(7), "not a run: `rows`"),
        (|value| value["bench"] = Value::Null, "not a run: `bench`"),
        (|value| value["device_name"] = json!(["x"]), "not a run: `device_name`"),
        (|value| value["date"] = json!(5), "not a run: `date`"),
        (|value| value["rows"][1] = json!("text"), "row 2: `unit`"),
        (|value| value["rows"][1]["unit"] = json!("furlongs"), "row 2: `unit`"),
        (|value| value["rows"][1]["name"] = json!(7), "row 2: `name`"),
        (|value| value["rows"][1]["value"] = json!("7"), "row 2: `value`"),
        (|value| value["rows"][1]["value"] = json!(1e300), "row 2: `value`"),
        (|value| value["rows"][1]["peer_value"] = json!([]), "row 2: `peer_value`"),
        (|value| value["rows"][4]["interval"] = json!([1.0]), "row 5: `interval`"),
        (|value| *value = json!([]), "not a run: `rows`"),
    ];
    for (change, expected) in table {
        let said = with(change);
        assert!(said.starts_with(expected) && !said.contains('\n'), "{expected}: {said}");
    }
    assert!(matches!(BenchRun::parse("{"), Err(PlotError::Json(_))));
    assert!(matches!(BenchRun::parse("{\"rows\": 1e999}"), Err(PlotError::Json(_))));
}

#[test]
fn extreme_figures_are_drawn_inside_the_picture() {
    let figures = [1e15, 1e-300, 1.0, 0.0, -1e15, f64::MIN_POSITIVE];
    for count in 1..=figures.len() {
        for unit in [Unit::NsPerPair, Unit::GbPerSecond, Unit::Percent, Unit::CpuPerGib] {
            let row = |(at, figure): (usize, &f64)| json!({"name": format!("row {at}"), "value": figure, "unit": unit.name(), "peer": "p", "peer_value": figure});
            let bars: Vec<_> = figures[..count].iter().enumerate().map(row).collect();
            assert_inside(&drawn(Value::from(bars)));
        }
    }
}
