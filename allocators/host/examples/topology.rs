//! Prints the NUMA nodes of machines, a line each: of this one, or of those whose files are below
//! the given roots.
#![expect(clippy::print_stdout, reason = "an example shows what it found")]

use aquifer_host::topology::Topology;
use std::{env, path::PathBuf};

fn main() {
    let mut roots: Vec<PathBuf> = env::args_os().skip(1).map(PathBuf::from).collect();
    if roots.is_empty() {
        roots.push("/".into());
    }
    for root in roots {
        println!("{}", root.display());
        match Topology::read_under(&root) {
            Ok(topology) => topology.nodes().iter().for_each(|node| {
                let memory = node.memory.map_or("unknown".into(), |bytes| bytes.to_string());
                let far: Vec<_> = node.distances.iter().map(|(_, far)| far.to_string()).collect();
                println!(
                    "  {}: CPUs [{}], allowed [{}], memory {memory} allowed {}, distances [{}]",
                    node.id,
                    node.cpus,
                    node.allowed_cpus,
                    node.memory_allowed,
                    far.join(" ")
                );
            }),
            Err(e) => println!("  {e}"),
        }
    }
}
