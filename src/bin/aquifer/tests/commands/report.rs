//! `aquifer report` as a person runs it: text, JSON, the page, and errors.

use crate::support::{Folder, aquifer, data, number, program, snapshot, text};
use aquifer_core::{Budget, Recorder, event::TraceFile};
use aquifer_device::{DevicePool, PoolConfig, Request};
use aquifer_driver::{DeviceId, sim::Sim};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::Value;
use std::{env, fs, io::Read, path::Path, process::Output, sync::Arc};

fn report<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Output {
    program().arg("report").args(arguments).output().expect("the program starts")
}

fn json(arguments: &[&str]) -> Value {
    let output = report(arguments.iter().chain(&["--json"]));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}"))
}

const WIDE: &str = "t_us,op,id,bytes,stream,kind,device,tag,address,thread\n";

/// Growth, two tags, a block in use beyond its free, and a request that fails for fragmentation.
fn fragmented() -> String {
    let base = 0x7f00_0000_0000_u64;
    let unit = 1 << 20;
    let mut rows = format!("{WIDE}0,g,0,{},0,cached,0,,{base:#x},1\n", 8 * unit);
    for n in 0..8 {
        let tag = if n % 2 == 0 { "kv cache" } else { "<b>weights</b>" };
        let at = base + n * unit;
        rows += &format!("{},a,{},{unit},0,cached,0,{tag},{at:#x},1\n", n + 1, n + 1);
    }
    for n in [0, 2, 4] {
        let at = base + n * unit;
        rows += &format!("20,f,{0},{unit},0,cached,0,kv cache,{at:#x},1\n", n + 1);
        if n != 4 {
            rows += &format!("20,c,{0},{unit},0,cached,0,kv cache,{at:#x},1\n", n + 1);
        }
    }
    rows + &format!(
        "30,x,0,{},0,cached,0,activations,,1\n40,v,0,0,0,cached,0,,{base:#x},2\n",
        2 * unit
    )
}

/// Returns the payload of a page: its header, and its arrays.
fn payload(page: &str) -> (Value, Vec<u8>) {
    let begin = page.find("id=\"data\">").expect("the data") + "id=\"data\">".len();
    let end = begin + page[begin..].find('<').expect("its end");
    let compressed = STANDARD.decode(&page[begin..end]).expect("base64");
    let mut bytes = Vec::new();
    flate2::read::ZlibDecoder::new(compressed.as_slice()).read_to_end(&mut bytes).expect("zlib");
    let length = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes")) as usize;
    assert_eq!((4 + length) % 8, 0);
    let header = serde_json::from_slice(&bytes[4..4 + length]).expect("JSON");
    (header, bytes.split_off(4 + length))
}

fn f64s(arrays: &[u8], at: &Value) -> Vec<f64> {
    assert_eq!(at["type"], "f64");
    let from = number(&at["at"]) as usize;
    assert_eq!(from % 8, 0);
    let part = &arrays[from..from + 8 * number(&at["len"]) as usize];
    part.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
}

#[test]
fn every_sum_at_the_peak_is_the_peak_and_the_one_of_a_replay() {
    let made = "made:phases,length=0.2".to_owned();
    let inputs = [
        data("serve_mixed.csv.xz"),
        data("resnet_train.csv.xz"),
        made,
        snapshot("start.pickle"),
        snapshot("ring.pickle"),
        snapshot("pending.pickle"),
        snapshot("old.pickle"),
    ];
    for input in inputs {
        let value = json(&[&input]);
        let run = &value["runs"][0];
        let peak = number(&run["peak"]["live"]);
        let trace = aquifer_formats::trace::Trace::read(input.as_ref(), None).expect("a trace");
        assert_eq!(peak, trace.peak_live, "{input}");
        assert_eq!(number(&run["live_at_end"]), trace.live_at_end, "{input}");
        assert_eq!(number(&run["blocks"]), trace.allocations(), "{input}");
        let live = &run["series"][0];
        assert_eq!(
            (&live["name"], live["max"].as_f64()),
            (&Value::from("live"), Some(peak as f64))
        );
        for by in ["tag", "size", "stream", "thread", "kind", "stack"] {
            let rows = run["holders"][by].as_array().expect("holders");
            let sum = |what: &str| rows.iter().map(|row| number(&row[what])).sum::<u64>();
            assert_eq!(
                (sum("bytes"), sum("blocks")),
                (peak, number(&run["peak"]["blocks"])),
                "{by}"
            );
        }
    }
}

#[test]
fn a_page_has_all_blocks_and_curves_and_the_figures_of_the_json() {
    let folder = Folder::new();
    let (page, input) = (folder.path("page.html"), data("serve_mixed.csv.xz"));
    let output = report([&input, "-o", &page]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with(&page) && output.stderr.is_empty());
    let html = fs::read_to_string(&page).expect("a page");
    assert!(
        !html.contains("/*STYLE*/")
            && !html.contains("/*SCRIPT*/")
            && !html.contains("<!--DATA-->")
    );
    assert!(!html.contains("http://") || !html.contains("src=\"http"), "no network");
    let (header, arrays) = payload(&html);
    let (run, plain) = (&header["runs"][0], &json(&[&input])["runs"][0]);
    for same in [
        "peak",
        "slack",
        "fragmentation",
        "markers",
        "failures",
        "events",
        "notes",
        "address_height",
    ] {
        assert_eq!(run[same], plain[same], "{same}");
    }
    assert_eq!(run["holders"]["size"], plain["holders"]["size"]);
    let blocks = |name: &str| f64s(&arrays, &run["blocks"][name]);
    let (birth, freed, requested, bytes, offset) =
        (blocks("birth"), blocks("freed"), blocks("requested"), blocks("bytes"), blocks("offset"));
    assert_eq!(birth.len() as u64, number(&plain["blocks"]));
    assert!(birth.is_sorted() && birth.iter().zip(&freed).all(|(birth, freed)| birth <= freed));
    let height = run["address_height"].as_f64().expect("a height");
    assert!(bytes.iter().zip(&offset).all(|(bytes, offset)| bytes + offset <= height));
    assert!(requested.iter().all(|bytes| *bytes > 0.0));
    let level = &run["series"][0]["levels"][0];
    let highest = f64s(&arrays, &level["max"]).into_iter().fold(0.0, f64::max);
    assert_eq!(Some(highest), run["peak"]["live"].as_f64());
    assert_eq!(folder.names(), ["page.html"]);
}

#[test]
fn a_page_over_its_limit_merges_the_smallest_blocks_and_says_so() {
    let folder = Folder::new();
    let (page, input) = (folder.path("page.html"), data("serve_mixed.csv.xz"));
    let most = 400_000;
    let output = report([&input, "-o", &page, "--max-page", &most.to_string()]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let html = fs::read_to_string(&page).expect("a page");
    assert!(html.len() <= most, "{}", html.len());
    let (header, arrays) = payload(&html);
    let run = &header["runs"][0];
    let (kept, merged) = (f64s(&arrays, &run["blocks"]["bytes"]), number(&run["bands"]["count"]));
    assert_eq!(kept.len() as u64 + merged, 12_000);
    assert!(kept.len() > 100 && merged > 100, "{} {merged}", kept.len());
    let below = run["bands"]["below"].as_f64().expect("bytes");
    assert!(kept.iter().all(|bytes| *bytes >= below - 1.0));
    assert_eq!(f64s(&arrays, &run["bands"]["t"]).len(), f64s(&arrays, &run["bands"]["live"]).len());
    // Each of them is in one cell of the bands at least.
    let grid = &run["bands"]["grid"];
    let (rows, columns) = (f64s(&arrays, &grid["rows"]), number(&grid["columns"]));
    let cells = rows.len() as u64 * columns;
    assert!(rows.is_sorted() && cells > 1000, "{cells} cells");
    assert_eq!([&grid["counts"], &grid["shares"]].map(|each| number(&each["len"])), [cells; 2]);
    let from = number(&grid["counts"]["at"]) as usize;
    let counts = arrays[from..from + 4 * cells as usize].as_chunks::<4>().0;
    let sum: u64 = counts.iter().map(|count| u64::from(u32::from_le_bytes(*count))).sum();
    assert!(sum >= merged, "{sum} of {merged}");
    let notes = run["notes"].as_array().expect("notes");
    assert!(notes.iter().any(|note| note.as_str().is_some_and(|note| note.contains("--max-page"))));
    refused(&report([&input, "-o", &page, "--max-page", "1000"]), "without any block");
    assert_eq!(fs::read_to_string(&page).expect("a page"), html, "what was there stays");
}

#[test]
fn a_failure_is_explained_by_what_was_free_and_by_the_cheapest_place() {
    let folder = Folder::new();
    let input = folder.file("trace.csv", fragmented());
    let value = json(&[&input]);
    let run = &value["runs"][0];
    let lines: Vec<&str> = run["failures"][0]["text"]
        .as_array()
        .expect("lines")
        .iter()
        .map(|line| line.as_str().expect("text"))
        .collect();
    let expected = [
        "2.00 MiB wanted for activations in row 16",
        "live 5.00 MiB in 5 blocks, pending 1.00 MiB, cached 2.00 MiB of 8.00 MiB physical",
        "2.00 MiB free between blocks, 1.00 MiB of it in one piece",
        "fragmented: enough was free, but the largest piece was 1.00 MiB too small",
        "the cheapest place for it held 1.00 MiB in 1 blocks: <b>weights</b> 1.00 MiB in 1 block",
        "most was held by: <b>weights</b> 4.00 MiB in 4 blocks, kv cache 1.00 MiB in 1 block",
        "freed but still in use: kv cache 1.00 MiB in 1 block",
    ];
    assert_eq!(lines, expected);
    assert_eq!(run["peak"]["physical"], 8 << 20);
    assert_eq!(run["slack"]["cached"], 0);
    assert_eq!(run["addresses"], "recorded");
    let kinds: Vec<_> =
        run["markers"].as_array().expect("marks").iter().map(|mark| &mark["kind"]).collect();
    assert_eq!(kinds, ["grow", "fail", "finding"]);
    let names: Vec<_> =
        run["series"].as_array().expect("series").iter().map(|one| &one["name"]).collect();
    assert_eq!(names, ["live", "pending", "cached", "physical", "free", "largest_free"]);
}

#[test]
fn pending_memory_is_named_where_it_would_have_been_enough() {
    let folder = Folder::new();
    let mib = 1 << 20;
    let rows = format!(
        "{WIDE}0,g,0,{0},0,cached,0,,,1\n1,a,1,{1},0,cached,0,,,1\n2,a,2,{2},0,cached,0,,,1\n\
         3,f,2,{2},0,cached,0,,,1\n4,x,0,{2},0,cached,0,,,1\n5,x,0,{0},0,cached,0,,,1\n",
        8 * mib,
        3 * mib,
        4 * mib
    );
    let value = json(&[&folder.file("trace.csv", rows)]);
    let lines = |place: usize| value["runs"][0]["failures"][place]["text"].to_string();
    let have = "live 3.00 MiB in 1 blocks, pending 4.00 MiB, cached 1.00 MiB of 8.00 MiB physical";
    let enough = "what was pending would have been enough: freed, but a stream still used it";
    assert!(lines(0).contains(have) && lines(0).contains(enough), "{value}");
    assert!(lines(1).contains(have) && !lines(1).contains(enough), "{value}");
}

#[test]
fn hundreds_of_failures_are_counted_by_tag() {
    let folder = Folder::new();
    let mut rows = fragmented();
    for n in 0..300 {
        let tag = if n % 3 == 0 { "logits" } else { "" };
        rows += &format!("{},x,0,{},0,cached,0,{tag},,1\n", 50 + n, (9 + n) << 20);
    }
    let input = folder.file("trace.csv", rows);
    let run = &json(&[&input])["runs"][0];
    let rows = [("", 200, 10, 308, 21, 319), ("logits", 100, 9, 306, 20, 317)];
    let rows = rows.map(|(tag, count, least, most, first, last)| {
        serde_json::json!({
            "tag": tag, "refused_by": "", "count": count, "least": least << 20, "most": most << 20,
            "first": f64::from(30 + first), "last": f64::from(30 + last),
        })
    });
    let groups = run["failure_groups"].as_array().expect("groups");
    assert_eq!(groups[..2], rows);
    assert_eq!((groups.len(), &groups[2]["tag"]), (3, &"activations".into()));
    assert!(run["failures"].as_array().is_some_and(|failures| failures.len() < 40));
    let said = text(&report([&input]).stdout);
    let line = "  301 requests failed in all: 200 untagged, 100 for logits, 1 for activations";
    assert!(said.lines().any(|each| each == line), "{said}");
}

#[test]
fn a_recorded_refusal_of_a_tenant_is_shown_with_the_names_of_both_budgets() {
    let folder = Folder::new();
    let trace = folder.path("trace.csv");
    let recorder = Recorder::new(Arc::new(TraceFile::create(trace.as_ref()).expect("a trace")));
    let mut config = PoolConfig::default();
    config.recorder = Some(Arc::new(recorder));
    let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), config).expect("a pool");
    let stream = pool.stream().expect("a stream");
    let all = Budget::new("all, tenants", 20 << 20);
    let tenant = all.child("tenant a", 16 << 20);
    let for_tenant = pool.for_tenant(&tenant).expect("a tenant");
    let held = for_tenant.alloc(&stream, Request::bytes(10 << 20)).expect("a block");
    let other = all.charge(8 << 20).expect("room");
    for bytes in [5 << 20, 6 << 20, 7 << 20] {
        for_tenant.alloc(&stream, Request::bytes(bytes)).expect_err("a refusal");
    }
    drop((held, other, for_tenant, pool));
    let both = "all, tenants/tenant a";
    let run = &json(&[&trace])["runs"][0];
    let group = &run["failure_groups"][0];
    assert_eq!((&group["refused_by"], &group["count"]), (&both.into(), &2.into()), "{run}");
    let failures = run["failures"].as_array().expect("failures");
    let by: Vec<_> = failures.iter().map(|failure| &failure["refused_by"]).collect();
    assert_eq!(by, [both, both, "tenant a"]);
    assert_eq!(failures[0]["text"][1], format!("refused by the budget {both}"));
    let said = text(&report([&trace]).stdout);
    assert!(said.contains(&format!("  refused by the budget {both}\n")), "{said}");
    let line = format!(
        "3 requests failed in all: 2 untagged refused by {both}, 1 untagged refused by tenant a"
    );
    let words = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains(&line), "{said}");
    let page = folder.path("page.html");
    assert_eq!(report([&trace, "-o", &page]).status.code(), Some(0));
    let (payload, _) = payload(&fs::read_to_string(&page).expect("a page"));
    assert_eq!(payload["runs"][0]["failure_groups"], run["failure_groups"]);
}

#[test]
fn pinned_memory_is_a_curve_of_its_own() {
    let folder = Folder::new();
    let rows = "0,a,1,10,0,cached,0,,,1\n2,a,2,70,0,pinned,host,,,1\n4,f,2,70,0,pinned,host,,,1\n\
        5,f,1,10,0,cached,0,,,1\n";
    let run = &json(&[&folder.file("trace.csv", format!("{WIDE}{rows}"))])["runs"][0];
    let [curve] = &series_of(run, "pinned")[..] else { panic!("{run}") };
    assert_eq!(
        [&curve["first"], &curve["max"], &curve["last"]].map(Value::as_f64),
        [70.0, 70.0, 0.0].map(Some)
    );
    let [live] = &series_of(run, "live")[..] else { panic!("{run}") };
    assert_eq!(live["max"].as_f64(), Some(10.0));
}

/// Returns the series of a run that have this name.
fn series_of(run: &Value, name: &str) -> Vec<Value> {
    let series = run["series"].as_array().expect("series").iter();
    series.filter(|series| series["name"] == name).cloned().collect()
}

#[test]
fn the_limit_is_shown_wherever_a_trace_tells_it() {
    let folder = Folder::new();
    let input = folder.path("limited.csv");
    let page = folder.path("page.html");
    let mib = 1_u64 << 20;
    let limit = |at: u64, bytes: u64| format!("{at},l,0,{bytes},0,cached,0,,,1\n");
    let whole = fragmented();
    let (head, rest) = whole.split_at(WIDE.len());
    let (before, after) = rest.split_at(rest.find("20,f").expect("a free"));
    let rows =
        [head, &limit(0, 64 * mib), before, &limit(10, 9 * mib), after, &limit(50, 0)].concat();
    fs::write(&input, rows).expect("a trace");
    let run = &json(&[&input])["runs"][0];
    assert_eq!(number(&run["peak"]["limit"]), 64 * mib, "when the most was live");
    let of = |run: &Value| series_of(run, "limit");
    let (most, least) = ((64 * mib) as f64, (9 * mib) as f64);
    let [curve] = &of(run)[..] else { panic!("{run}") };
    let ends = ["first", "last", "min", "max"].map(|name| curve[name].as_f64());
    assert_eq!(ends, [Some(most), None, Some(least), Some(most)]);
    let failure = run["failures"][0]["text"].to_string();
    assert!(failure.contains("limit 9.00 MiB"), "{failure}");
    let said = text(&report([&input, "--text"]).stdout).to_owned();
    assert!(
        said.lines().any(|line| line.starts_with("limit ") && line.contains("64.00 MiB")),
        "{said}"
    );

    assert!(report([&input, "-o", &page]).status.success());
    let (header, arrays) = payload(&fs::read_to_string(&page).expect("a page"));
    let [curve] = &of(&header["runs"][0])[..] else { panic!("{header}") };
    let [level] = &curve["levels"].as_array().expect("levels")[..] else { panic!("{curve}") };
    assert_eq!(f64s(&arrays, &level["t"]), [0.0, 10.0, 50.0]);
    let last = f64s(&arrays, &level["last"]);
    assert!(last[..2] == [most, least] && last[2].is_nan(), "{last:?}");

    // Older traces do not tell it.
    fs::write(&input, fragmented()).expect("a trace");
    let run = &json(&[&input])["runs"][0];
    assert!(run["peak"]["limit"].is_null() && of(run).is_empty(), "{run}");
}

#[test]
fn what_is_in_use_outside_is_shown_wherever_a_trace_tells_it() {
    let folder = Folder::new();
    let input = folder.path("beside.csv");
    let page = folder.path("page.html");
    let mib = 1_u64 << 20;
    let outside = |at: u64, bytes: u64| format!("{at},o,0,{bytes},0,cached,0,,,1\n");
    let whole = fragmented();
    let (head, rest) = whole.split_at(WIDE.len());
    let (before, after) = rest.split_at(rest.find("20,f").expect("a free"));
    let rows =
        [head, &outside(0, 600 * mib), before, &outside(10, 900 * mib), after, &outside(50, 0)];
    fs::write(&input, rows.concat()).expect("a trace");
    let run = &json(&[&input])["runs"][0];
    let at_peak = [&run["peak"]["outside"], &run["slack"]["outside"]].map(number);
    assert_eq!(at_peak, [600 * mib; 2], "when the most was live");
    let of = |run: &Value| series_of(run, "outside");
    let [curve] = &of(run)[..] else { panic!("{run}") };
    let ends = ["first", "last", "min", "max"].map(|name| curve[name].as_f64());
    let (first, most) = ((600 * mib) as f64, (900 * mib) as f64);
    assert_eq!(ends, [Some(first), Some(0.0), Some(0.0), Some(most)]);
    let failure = run["failures"][0]["text"].to_string();
    assert!(failure.contains("outside 900.00 MiB"), "{failure}");
    let said = text(&report([&input, "--text"]).stdout);
    assert!(
        said.lines().any(|line| line.starts_with("outside ") && line.contains("600.00 MiB")),
        "{said}"
    );

    assert!(report([&input, "-o", &page]).status.success());
    let (header, arrays) = payload(&fs::read_to_string(&page).expect("a page"));
    let [curve] = &of(&header["runs"][0])[..] else { panic!("{header}") };
    let [level] = &curve["levels"].as_array().expect("levels")[..] else { panic!("{curve}") };
    assert_eq!(f64s(&arrays, &level["t"]), [0.0, 10.0, 50.0]);
    assert_eq!(f64s(&arrays, &level["last"]), [first, most, 0.0]);

    // Older traces do not tell it.
    fs::write(&input, fragmented()).expect("a trace");
    let run = &json(&[&input])["runs"][0];
    assert!(run["slack"]["outside"].is_null() && of(run).is_empty(), "{run}");
}

#[test]
fn text_fits_a_log_and_holds_nothing_that_acts_on_a_terminal() {
    let folder = Folder::new();
    let hostile = fragmented().replace("kv cache", "%1B[2J%E2%80%AEx%0Ay");
    let input = folder.file("trace\u{1b}[2J.csv", hostile);
    let other = data("resnet_train.csv.xz");
    for arguments in [
        vec![input.as_str()],
        vec![&input, &input],
        vec![&input, &other],
        vec![&other],
        vec![&other, "--text"],
    ] {
        let output = report(&arguments);
        let said = text(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert!(said.lines().count() <= 60, "{said}");
        assert!(said.lines().all(|line| line.chars().count() <= 80), "{said}");
        let acts = |c: char| c != '\n' && (c.is_control() || c == '\u{202e}');
        assert!(!said.contains(acts), "{said:?}");
        assert_eq!(
            said.contains("difference at the peaks"),
            arguments.len() == 2 && arguments[1] != "--text"
        );
    }
    let page = folder.path("page.html");
    assert_eq!(report([&input, "-o", &page]).status.code(), Some(0));
    assert!(!fs::read_to_string(&page).expect("a page").contains("<b>weights"));
}

#[test]
fn the_text_of_the_recorded_traces_is_as_before() {
    for name in ["serve_mixed", "resnet_train", "llama_train"] {
        let said = text(&report([data(&format!("{name}.csv.xz"))]).stdout);
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/report_{name}.txt"));
        if env::var_os("AQUIFER_BLESS").is_some() {
            fs::write(&path, &said).expect("the golden file");
        }
        let golden = fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(said, golden, "AQUIFER_BLESS=1 writes it anew");
    }
}

#[test]
fn two_traces_are_compared_at_their_peaks() {
    let folder = Folder::new();
    let first = folder.file("a.csv", fragmented());
    let second = folder.file("b.csv", fragmented().replace("kv cache", "kv"));
    let value = json(&[&first, &second]);
    let comparison = &value["comparisons"][0];
    assert_eq!(
        (&comparison["difference"], &comparison["peaks"][0]),
        (&Value::from(0), &value["runs"][0]["peak"]["live"])
    );
    let rows = comparison["tag"].as_array().expect("rows");
    let row = |name: &str| rows.iter().find(|row| row["name"] == name).expect("a row");
    assert_eq!(row("kv")["difference"], 4 << 20);
    assert_eq!(row("kv cache")["difference"], -(4 << 20));
    assert_eq!(row("<b>weights</b>")["difference"], 0);
    let page = folder.path("page.html");
    assert_eq!(report([&first, &second, "-o", &page]).status.code(), Some(0));
    let (header, _) = payload(&fs::read_to_string(&page).expect("a page"));
    assert_eq!(header["runs"].as_array().map(Vec::len), Some(2));
    assert_eq!(&header["comparisons"][0], comparison);
}

/// Returns a trace whose devices have a block of these bytes each, the last with the most events.
fn with_devices(bytes: &[(&str, u64)]) -> String {
    let mut rows = WIDE.to_owned();
    for (place, (device, bytes)) in bytes.iter().enumerate() {
        for n in 0..=place {
            let id = place * 100 + n;
            let bytes = if n == 0 { *bytes } else { 1 };
            rows += &format!("0,a,{id},{bytes},0,cached,{device},,,1\n");
        }
    }
    rows
}

#[test]
fn a_gate_checks_every_device() {
    let folder = Folder::new();
    let (large, small) = (100_u64 << 30, 1 << 20);
    let rows = with_devices(&[("1", large), ("host", 9 * large), ("0", small)]);
    let input = folder.file("trace.csv", rows);
    let gate = |more: &[&str]| report([&[&input, "--fail-over", "1GiB"], more].concat());
    let output = gate(&[]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let last = said.lines().last().expect("a line");
    assert_eq!(last, "the peak of trace.csv on device 1 is 100.00 GiB, above 1.00 GiB");
    assert!(
        said.contains("--device-index shows others: device 1 with"),
        "the text names it too: {said}"
    );
    assert_eq!(gate(&["--device-index", "0"]).status.code(), Some(0));
    assert_eq!(gate(&["--device-index", "host"]).status.code(), Some(1));
    let output = gate(&["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let value: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let peaks: Vec<_> = value["peaks"].as_array().expect("peaks").iter().collect();
    let of = |peak: &Value| (peak["device"].as_str().map(str::to_owned), number(&peak["live"]));
    let expected = [(Some("0".to_owned()), small + 2), (Some("1".to_owned()), large)];
    assert_eq!(peaks.into_iter().map(of).collect::<Vec<_>>(), expected);
    // Two inputs: each device of each.
    let other = folder.file("other.csv", with_devices(&[("0", small)]));
    for inputs in [[&other, &input], [&input, &other]] {
        let output = report([inputs[0], inputs[1], "--fail-over", "1GiB"]);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    }
    // A device of a snapshot that only has blocks from before its first event.
    let devices = snapshot("devices.pickle");
    let value = json(&[&devices]);
    let peaks = value["peaks"].as_array().expect("peaks");
    let most = peaks.iter().map(|peak| number(&peak["live"])).max().expect("a device");
    let least = peaks.iter().map(|peak| number(&peak["live"])).min().expect("a device");
    assert!(peaks.len() > 1 && least < most, "{value}");
    let output = report([&devices, "--fail-over", &(most - 1).to_string()]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
}

#[test]
fn a_comparison_is_of_the_same_devices() {
    let folder = Folder::new();
    // The device with the most events is another one in each.
    let before = folder.file("before.csv", with_devices(&[("1", 1000), ("2", 7), ("0", 100)]));
    let after = folder.file("after.csv", with_devices(&[("0", 150), ("1", 900)]));
    let value = json(&[&before, &after]);
    let compared: Vec<_> = value["comparisons"]
        .as_array()
        .expect("comparisons")
        .iter()
        .map(|one| (one["device"].clone(), one["difference"].clone()))
        .collect();
    assert_eq!(compared, [("0".into(), 48.into()), ("1".into(), (-99).into())]);
    let runs: Vec<_> =
        value["runs"].as_array().expect("runs").iter().map(|run| run["device"].clone()).collect();
    assert_eq!(runs, ["0", "0", "1", "1"]);
    let said = text(&report([&before, &after]).stdout);
    assert!(said.contains("difference at the peaks of device 0: +48 B"), "{said}");
    assert!(said.contains("difference at the peaks of device 1: -99 B"), "{said}");
    let page = folder.path("page.html");
    assert_eq!(report([&before, &after, "-o", &page]).status.code(), Some(0));
    let (header, _) = payload(&fs::read_to_string(&page).expect("a page"));
    assert_eq!(header["runs"].as_array().map(Vec::len), Some(4));
    let value = json(&[&before, &after, "--device-index", "1"]);
    assert_eq!(value["comparisons"].as_array().map(Vec::len), Some(1));

    let other = folder.file("other.csv", with_devices(&[("3", 5), ("4", 5)]));
    refused(
        &report([&after, &other]),
        "after.csv has memory of devices 1, 0 and other.csv has memory of devices 4, 3: only \
         memory of the same device can be compared",
    );
    // An input that does not tell its device is compared with the only one of the other.
    let untold = folder.file("untold.csv", "t_us,op,id,bytes,stream\n0,a,1,10,0\n");
    let one = folder.file("one.csv", with_devices(&[("3", 5)]));
    assert_eq!(json(&[&untold, &one])["comparisons"][0]["difference"], -5);
    refused(&report([&untold, &after]), "untold.csv does not tell its device and after.csv has");
}

#[test]
fn a_peak_above_the_limit_is_status_one() {
    let input = data("resnet_train.csv.xz");
    for (limit, status) in [("2GiB", 1), ("3GiB", 0)] {
        let output = report([&input, "--fail-over", limit]);
        assert_eq!(output.status.code(), Some(status), "{}", text(&output.stdout));
        assert_eq!(text(&output.stdout).contains(", above 2.00 GiB"), status == 1);
    }
    assert_eq!(report([&input, "--json", "--fail-over", "1M"]).status.code(), Some(1));
}

#[test]
fn memory_of_a_device_or_of_the_host_is_chosen() {
    let folder = Folder::new();
    let rows = "0,a,1,10,0,cached,0,,,1\n1,a,2,20,0,cached,1,,,1\n2,a,3,5,0,cached,1,,,1\n3,a,4,9,0,pinned,host:1,,,1\n";
    let input = folder.file("trace.csv", format!("{WIDE}{rows}"));
    for (device, peak) in [(None, 25), (Some("0"), 10), (Some("1"), 25), (Some("host:1"), 9)] {
        let mut arguments = vec![input.as_str()];
        arguments.extend(device.iter().flat_map(|device| ["--device-index", device]));
        let value = json(&arguments);
        assert_eq!(value["runs"][0]["peak"]["live"], peak, "{device:?}");
        assert_eq!(value["runs"][0]["devices"].as_array().map(Vec::len), Some(3));
    }
    let of_snapshot = json(&[&snapshot("devices.pickle"), "--device-index", "0"]);
    assert_eq!(of_snapshot["runs"][0]["device"], "0");
    refused(&report([&input, "--device-index", "7"]), "nothing is allocated on device 7");
    refused(&report([&input, "--device-index", "gpu"]), "a device of a trace is a number");
    refused(
        &report([&snapshot("start.pickle"), "--device-index", "host"]),
        "nothing is allocated on device host",
    );
}

#[test]
fn what_makes_no_sense_is_one_line_on_stderr_and_leaves_no_file() {
    let folder = Folder::new();
    let good = folder.file("good.csv", fragmented());
    let cut = folder.file("cut.csv", &fragmented()[..fragmented().len() - 3]);
    let page = folder.path("page.html");
    refused(&report([&cut, "-o", &page]), "row 17: cut off");
    refused(&report([&good, &cut, "-o", &page]), "cut.csv, row 17: cut off");
    refused(&report(["/nowhere.csv"]), "/nowhere.csv: No such file");
    refused(&report([&snapshot("broken.harm.pickle"), "-o", &page]), "not a memory snapshot");
    refused(&report([&good, "-o", &good]), "would replace the trace");
    refused(&report(["-", "-"]), "the standard input can be read once");
    refused(&report([&good, "-o", &folder.path("no/such/page.html")]), "cannot be written");
    refused(&report([&good, "-o", folder.0.to_str().expect("text")]), "it is a directory");
    refused(&report([&good, "-o", "/dev/full"]), "cannot be written");
    refused(&report([&good, "--text", "--json"]), "cannot be used with");
    refused(&report([&good, "--fail-over", "0"]), "invalid value '0'");
    assert_eq!(folder.names(), ["cut.csv", "good.csv"]);
    assert_eq!(fs::read_to_string(&good).expect("the trace"), fragmented());
}

fn refused(output: &Output, expected: &str) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(output.stdout.is_empty(), "{}", text(&output.stdout));
    assert!(said.starts_with("aquifer: ") && said.lines().count() == 1, "{said:?}");
    assert!(said.contains(expected), "{expected}: {said}");
}

#[test]
fn a_gate_refuses_a_log_of_which_rows_cannot_be_read() {
    let folder = Folder::new();
    let log = folder.path("log.csv");
    let good = "1,10:00:00.000001,allocate,0x7f0000000000,100,0\n";
    let bad = "1,10:00:00.000002,allocate,0x7f0000100000,1GiB,0\n";
    let report_gate = ["report", &log, "--fail-over", "1MiB"];
    let plan_gate = ["plan", &log, "--check", "--limit", "1MiB"];
    let gates: [&[&str]; 2] = [&report_gate, &plan_gate];
    for (bad_rows, status) in [(0, 0), (3, 2)] {
        let rows =
            format!("Thread,Time,Action,Pointer,Size,Stream\n{good}{}", bad.repeat(bad_rows));
        fs::write(&log, rows).expect("a log");
        for gate in gates {
            let ran = aquifer(gate);
            assert_eq!(ran.status.code(), Some(status), "{gate:?}: {ran:?}");
            let said = text(&ran.stderr);
            assert_eq!(
                said.contains("cannot check 3 rows that cannot be read"),
                status == 2,
                "{said}"
            );
        }
    }
    assert_eq!(aquifer(["report", &log]).status.code(), Some(0), "without a gate it is a note");
}
