//! The header says what the library has: the same functions, the same numbers, structs of the same
//! form.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use aquifer_ffi::{
    device::{AQ_READ, AQ_WRITE},
    entry::{AQ_VERSION_MAJOR, AQ_VERSION_MINOR, aq_version},
    facts::{aq_device_facts, aq_stats},
    graphs::aq_torch_block,
    ledger::aq_ledger_options,
    runtime::{
        AQ_DRIVER_MACHINE, AQ_DRIVER_MACHINE_OR_SIM, AQ_DRIVER_SIM, AQ_SHARED_DEVICES,
        AQ_SHARED_PINNED, AQ_SHARED_RESERVED, AQ_SIM_PLAIN, AQ_SIM_UNCHECKED, AQ_STREAMS_RETIRED,
        AQ_STREAMS_UNTOLD, aq_runtime_options,
    },
    sharing::AQ_TORCH_SHARE_BYTES,
    sleep::{AQ_KEEP_DISK, AQ_KEEP_NONE, AQ_KEEP_PAGEABLE, AQ_KEEP_PINNED},
    status::Status,
};
use std::{
    collections::BTreeSet,
    fs,
    mem::{align_of, offset_of},
    path::{Path, PathBuf},
    process::{self, Command},
};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The header without its comments.
fn header() -> String {
    let mut text = fs::read_to_string(root().join("include/aquifer.h")).unwrap();
    while let Some(start) = text.find("/*") {
        let end = start + text[start..].find("*/").unwrap() + 2;
        text.replace_range(start..end, " ");
    }
    text
}

/// Every identifier in `text` that begins with `aq_` and is followed by `(`.
fn called(text: &str) -> BTreeSet<String> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.match_indices('(')
        .filter_map(|(at, _)| {
            let name: String = text[..at].chars().rev().take_while(|&c| word(c)).collect();
            Some(name.chars().rev().collect::<String>()).filter(|name| name.starts_with("aq_"))
        })
        .collect()
}

/// How many arguments each function of the header or of the sources has.
fn arguments(text: &str, name: &str) -> usize {
    let open = text.find(&format!("{name}(")).unwrap() + name.len() + 1;
    let list = text[open..open + text[open..].find(')').unwrap()].trim().trim_end_matches(',');
    if list.is_empty() || list == "void" { 0 } else { list.split(',').count() }
}

fn exported() -> String {
    let mut all = String::new();
    for file in fs::read_dir(root().join("src")).unwrap() {
        let text = fs::read_to_string(file.unwrap().path()).unwrap();
        for part in text.split("#[unsafe(no_mangle)]").skip(1) {
            let start = part.find("extern \"C\" fn ").unwrap() + "extern \"C\" fn ".len();
            all += &part[start..start + part[start..].find('{').unwrap()];
            all.push('\n');
        }
    }
    all
}

#[test]
fn every_function_is_declared_and_every_declared_one_is_there() {
    let (header, exported) = (header(), exported());
    let (declared, there) = (called(&header), called(&exported));
    assert_eq!(declared, there);
    assert!(declared.len() > 40, "{declared:?}");
    for name in &declared {
        assert_eq!(arguments(&header, name), arguments(&exported, name), "arguments of {name}");
    }
}

/// A struct's fields in the header.
fn fields(header: &str, name: &str) -> Vec<String> {
    let start = header.find(&format!("typedef struct {name} {{")).unwrap();
    let body = &header[start..start + header[start..].find('}').unwrap()];
    body.lines()
        .skip(1)
        .filter_map(|line| line.split_once(';')?.0.split_whitespace().last())
        .map(|field| field.trim_start_matches('*').split('[').next().unwrap().to_owned())
        .collect()
}

/// What a C compiler makes of the header: a line for each struct, field and number.
fn as_c_sees_it(header: &str) -> BTreeSet<String> {
    let mut source = String::from("#include \"aquifer.h\"\n#include <stdio.h>\nint main(void) {\n");
    let structs = [
        "aq_runtime_options",
        "aq_device_facts",
        "aq_stats",
        "aq_torch_block",
        "aq_ledger_options",
    ];
    for name in structs {
        source += &format!("printf(\"{name} %zu %zu\\n\", sizeof({name}), _Alignof({name}));\n");
        for field in fields(header, name) {
            source += &format!("printf(\"{name}.{field} %zu\\n\", offsetof({name}, {field}));\n");
        }
    }
    let numbers = header.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    for number in numbers.filter(|word| word.starts_with("AQ_")).collect::<BTreeSet<_>>() {
        source += &format!("printf(\"{number} %lld\\n\", (long long)({number}));\n");
    }
    source += "return 0;\n}\n";
    // Unique to this process: a program that another process writes must not be run.
    let at = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("layout-{}", process::id()));
    let (file, program) = (at.join("layout.c"), at.join("layout"));
    fs::create_dir_all(&at).unwrap();
    fs::write(&file, source).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let compiled = Command::new(compiler)
        .args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"])
        .arg(root().join("include"))
        .arg(&file)
        .arg("-o")
        .arg(&program)
        .status();
    assert!(compiled.unwrap().success());
    let said = Command::new(program).output().unwrap();
    fs::remove_dir_all(at).unwrap();
    String::from_utf8(said.stdout).unwrap().lines().map(str::to_owned).collect()
}

macro_rules! form {
    ($lines:ident, $name:ident { $($field:ident),* $(,)? }) => {
        $lines.insert(format!("{} {} {}", stringify!($name), size_of::<$name>(), align_of::<$name>()));
        $($lines.insert(format!("{}.{} {}", stringify!($name), stringify!($field), offset_of!($name, $field)));)*
    };
}

#[test]
fn c_and_rust_agree_on_forms_and_numbers() {
    let mut lines = BTreeSet::new();
    form!(lines, aq_torch_block { address, bytes, stream, first, second });
    form!(
        lines,
        aq_runtime_options {
            size,
            driver,
            streams,
            sim_devices,
            sim_flags,
            sim_memory,
            sim_seed,
            device_limit,
            pinned_limit,
            wait_ns,
            release_threshold,
            history,
            shared,
            shared_priority,
            shared_guarantee,
            pinned_guarantee,
            ledger_folder,
            plan,
            slack,
        }
    );
    form!(
        lines,
        aq_ledger_options { size, folder, name, capacity, guarantee, limit, priority, reserve }
    );
    form!(
        lines,
        aq_device_facts {
            size,
            memory,
            free_memory,
            granularity,
            ordinal,
            major,
            minor,
            node,
            simulated,
            virtual_memory,
            name,
            pci_address,
        }
    );
    form!(
        lines,
        aq_stats {
            size,
            live,
            requested,
            cached,
            pending,
            physical,
            peak_live,
            peak_requested,
            peak_physical,
            blocks,
            allocations,
            frees,
            failures,
            growths,
            reaped,
            moves,
            adoptions,
            fences,
            stream_waits,
            host_waits,
            plan_hits,
            plan_strays,
            plan_overlaps,
            plan_resynchronisations,
        }
    );
    for status in Status::ALL {
        lines.insert(format!("{} {}", status.name().to_str().unwrap(), *status as i32));
    }
    for (name, number) in [
        ("AQ_VERSION_MAJOR", AQ_VERSION_MAJOR),
        ("AQ_VERSION_MINOR", AQ_VERSION_MINOR),
        ("AQ_DRIVER_MACHINE", AQ_DRIVER_MACHINE),
        ("AQ_DRIVER_SIM", AQ_DRIVER_SIM),
        ("AQ_DRIVER_MACHINE_OR_SIM", AQ_DRIVER_MACHINE_OR_SIM),
        ("AQ_STREAMS_UNTOLD", AQ_STREAMS_UNTOLD),
        ("AQ_STREAMS_RETIRED", AQ_STREAMS_RETIRED),
        ("AQ_SIM_PLAIN", AQ_SIM_PLAIN),
        ("AQ_SIM_UNCHECKED", AQ_SIM_UNCHECKED),
        ("AQ_SHARED_DEVICES", AQ_SHARED_DEVICES),
        ("AQ_SHARED_PINNED", AQ_SHARED_PINNED),
        ("AQ_SHARED_RESERVED", AQ_SHARED_RESERVED),
        ("AQ_READ", AQ_READ),
        ("AQ_WRITE", AQ_WRITE),
        ("AQ_KEEP_NONE", AQ_KEEP_NONE),
        ("AQ_KEEP_PAGEABLE", AQ_KEEP_PAGEABLE),
        ("AQ_KEEP_PINNED", AQ_KEEP_PINNED),
        ("AQ_KEEP_DISK", AQ_KEEP_DISK),
        ("AQ_TORCH_SHARE_BYTES", AQ_TORCH_SHARE_BYTES),
    ] {
        lines.insert(format!("{name} {number}"));
    }
    assert_eq!(as_c_sees_it(&header()), lines);
    assert_eq!(aq_version(), AQ_VERSION_MAJOR << 16 | AQ_VERSION_MINOR);
}

/// The blocks of a language on the guide's page.
fn shown(language: &str) -> Vec<String> {
    let page = fs::read_to_string(root().join("../../src/guide/c_and_python.md")).unwrap();
    let opening = format!("```{language}\n");
    let blocks = page.split(&opening).skip(1);
    blocks.map(|block| block[..block.find("```").unwrap()].to_owned()).collect()
}

#[test]
fn what_the_guide_shows_is_what_is_compiled_and_run_elsewhere() {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    let (c, cpp) = (read("tests/c/guide.c"), read("tests/c/guide.cpp"));
    let python = ["../../python/examples/on_torch.py", "../../python/tests/on_sim.py"].map(read);
    let python = python.concat();
    for (language, source, blocks) in [("c", c, 1), ("cpp", cpp, 1), ("python", python, 3)] {
        let shown = shown(language);
        assert_eq!(shown.len(), blocks, "{language}");
        for block in shown {
            assert!(source.contains(&block), "no part of a program in {language}:\n{block}");
        }
    }
}
