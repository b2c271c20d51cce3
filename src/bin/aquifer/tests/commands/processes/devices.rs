//! What a GPU has in use outside of the processes: the driver's count less theirs.

use super::parts::{Part, Scratch, program};
use serde_json::{Value, json};
use std::{io, path::Path, process::Command};

/// Compiles the library that stands in for NVML.
///
/// # Errors
/// The system's error if there is no compiler.
fn compile(folder: &Scratch) -> io::Result<()> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/commands/processes/nvml.c");
    let library = folder.0.join("libnvidia-ml.so.1");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o"])
        .args([library, source])
        .status()?;
    assert!(status.success(), "the library does not compile");
    Ok(())
}

#[test]
fn the_drivers_count_is_compared_with_the_processes_on_the_same_gpu() {
    let (folder, libraries) = (Scratch::new("devices"), Scratch::new("devices-nvml"));
    if let Err(error) = compile(&libraries) {
        println!("skipped: there is no C compiler: {error}");
        return;
    }
    let mut parts = ["0000:01:00.0", "0000:01:00.0", "0000:02:00.0", "0000:09:00.0"]
        .map(|address| Part::start_at("gpu_process", &folder, address));
    parts.iter_mut().for_each(|part| assert_eq!(part.line(), "ready"));
    let mut simulated = Part::start("device_process", &folder, 1);
    simulated.figures();
    let output = |flags: &[&str]| {
        let mut command = program(&folder.0, flags);
        let output = command.env("LD_LIBRARY_PATH", &libraries.0).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    let all: Value = serde_json::from_str(&output(&["top", "--json"])).unwrap();
    assert_eq!(all["driver"], "NVML");
    let devices = all["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 3, "{all}");
    let gib = 1_u64 << 30;
    let expected = [
        ("0000:01:00.0", "GPU 1", 2, 2 * gib, json!(5 * gib), json!(16 * gib), json!(3 * gib)),
        ("0000:02:00.0", "GPU 2", 1, gib, Value::Null, Value::Null, Value::Null),
        // The driver of this machine does not show it, as within a container.
        ("0000:09:00.0", "a GPU", 1, gib, Value::Null, Value::Null, Value::Null),
    ];
    for (device, (address, name, processes, physical, used, total, outside)) in
        devices.iter().zip(expected)
    {
        let expected = json!({
            "address": address, "name": name, "processes": processes, "physical": physical,
            "live": physical / 2, "cached": physical / 2, "pending": 0, "driver_used": used,
            "driver_total": total, "outside": outside,
        });
        assert_eq!(*device, expected);
    }
    let page = output(&["top"]);
    let line = "0000:01:00.0 GPU 1: 2.00 GiB in 2 processes; live 1.00 GiB, cached 1.00 GiB, \
                pending 0 B; outside 3.00 GiB of 16.0 GiB";
    assert!(page.contains(line), "{page}");
    assert!(page.contains("GPU 2: 1.00 GiB in 1 process;"), "{page}");
    assert!(page.contains("outside unknown\n"), "{page}");
    // A dead process holds nothing.
    parts[1].kill();
    let all: Value = serde_json::from_str(&output(&["top", "--json"])).unwrap();
    let device = &all["devices"][0];
    assert_eq!((&device["processes"], &device["outside"]), (&1.into(), &(4 * gib).into()));
}
