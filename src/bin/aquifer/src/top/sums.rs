//! Sums over pools: of a process, of a place in it, and of a device over all processes.
//!
//! No sum mixes the memory of devices with that of the host. A process stands for its device
//! memory, or for its host memory if it has no other.

use super::{
    driver::{DriverCount, GpuAddress},
    reading::{EarlierCounts, PoolKeys, Rates},
};
use aquifer_benches::console::foreign::printable;
use aquifer_status::{PoolKind, PoolStatus, ProcessStatus};
use std::{collections::BTreeMap, path::PathBuf};

/// The sum over some pools. Saturates, since a damaged file may claim anything.
#[derive(Clone, PartialEq, Default, Debug)]
pub(super) struct PoolSum {
    pub(super) pools: u32,
    pub(super) live: u64,
    pub(super) requested: u64,
    pub(super) cached: u64,
    pub(super) pending: u64,
    pub(super) physical: u64,
    /// The sum of the peaks of `physical`: an upper bound of the common peak.
    pub(super) peak: u64,
    /// The limit of the only pool. `None` for several: budgets may be shared, so limits have no
    /// sum, and the sum of peaks would be compared with the limit of one.
    pub(super) limit: Option<u64>,
    /// The largest free extent of any pool at its last slow path. `None` if one does not publish
    /// it, or has less free by now.
    pub(super) largest_free: Option<u64>,
    /// `None` if a pool has no earlier reading.
    pub(super) rates: Option<Rates>,
}

impl PoolSum {
    fn of(pool: &PoolStatus, rates: Option<Rates>) -> Self {
        let stats = &pool.stats;
        Self {
            pools: 1,
            live: stats.live,
            requested: stats.requested,
            cached: stats.cached,
            pending: stats.pending,
            physical: stats.physical,
            peak: stats.peak_physical,
            limit: pool.limit,
            // It is as old as the last slow path. What is more than all that is free now is wrong.
            largest_free: pool.largest_free.filter(|largest| *largest <= stats.cached),
            rates,
        }
    }

    fn add(&mut self, other: &Self) {
        if self.pools == 0 {
            *self = other.clone();
            return;
        }
        self.pools += other.pools;
        for (sum, by) in [
            (&mut self.live, other.live),
            (&mut self.requested, other.requested),
            (&mut self.cached, other.cached),
            (&mut self.pending, other.pending),
            (&mut self.physical, other.physical),
            (&mut self.peak, other.peak),
        ] {
            *sum = sum.saturating_add(by);
        }
        self.limit = None;
        let both = self.largest_free.zip(other.largest_free);
        self.largest_free = both.map(|(a, b)| a.max(b));
        self.rates = self.rates.zip(other.rates).map(|(a, b)| a.add(b));
    }

    /// Returns the largest free extent as a part of all free bytes, in percent.
    pub(super) fn largest_percent(&self) -> Option<u64> {
        let largest = self.largest_free?;
        // Of nothing that is free, nothing is fragmented.
        let percent = u128::from(largest) * 100 / u128::from(self.cached.max(1));
        (self.cached > 0).then_some(percent.min(100) as u64)
    }
}

/// A device or a node of one process.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct PlaceSum {
    /// What it is, harmless on a terminal.
    pub(super) label: String,
    pub(super) sum: PoolSum,
}

/// One process.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct ProcessSum {
    pub(super) path: PathBuf,
    pub(super) process: u32,
    /// The command without the folder of its program, harmless on a terminal.
    pub(super) command: String,
    pub(super) is_alive: bool,
    /// Pools that cannot be read.
    pub(super) unreadable: usize,
    pub(super) device: PoolSum,
    pub(super) host: PoolSum,
    pub(super) places: Vec<PlaceSum>,
    /// The rates of each pool, in the order of the file.
    pub(super) rates: Vec<Option<Rates>>,
}

impl ProcessSum {
    pub(super) fn of<'r>(process: &'r ProcessStatus, earlier: &EarlierCounts<'r>) -> Self {
        let mut keys = PoolKeys::new(&process.path);
        let mut found = Self {
            path: process.path.clone(),
            process: process.process,
            command: printable(without_folder(&process.command)),
            is_alive: process.is_alive,
            unreadable: process.faults.len(),
            device: PoolSum::default(),
            host: PoolSum::default(),
            places: Vec::new(),
            rates: Vec::new(),
        };
        for pool in &process.pools {
            let rates = earlier.rates(&mut keys, pool);
            let sum = PoolSum::of(pool, rates);
            found.rates.push(rates);
            if is_on_device(pool) { &mut found.device } else { &mut found.host }.add(&sum);
            let label = label_of(pool);
            match found.places.iter_mut().find(|place| place.label == label) {
                Some(place) => place.sum.add(&sum),
                None => found.places.push(PlaceSum { label, sum }),
            }
        }
        found
    }

    /// Returns what the row of the process shows.
    pub(super) fn shown(&self) -> &PoolSum {
        if self.device.pools > 0 { &self.device } else { &self.host }
    }
}

/// Returns the command from the name of its program on, which a narrow column then shows.
fn without_folder(command: &str) -> &str {
    let program = command.split(' ').next().unwrap_or_default();
    let folder = program.rfind('/').map_or(0, |slash| slash + 1);
    if folder < program.len() { &command[folder..] } else { command }
}

pub(super) fn is_on_device(pool: &PoolStatus) -> bool {
    matches!(pool.kind, PoolKind::Device | PoolKind::Source)
}

fn label_of(pool: &PoolStatus) -> String {
    let mut label = match pool.kind {
        PoolKind::Device => String::new(),
        kind => kind.name().to_owned(),
    };
    let numbers = [("device", pool.device), ("node", pool.node)];
    for (name, number) in numbers.into_iter().filter_map(|(n, value)| Some((n, value?))) {
        if !label.is_empty() {
            label.push(' ');
        }
        label.push_str(&format!("{name} {number}"));
    }
    let name = printable(&pool.name);
    match name.is_empty() || name == label {
        true => label,
        false => format!("{label}: {name}"),
    }
}

/// A GPU, over all living processes.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct DeviceSum {
    /// Harmless on a terminal, as is the name.
    pub(super) address: String,
    pub(super) name: String,
    pub(super) processes: u32,
    pub(super) sum: PoolSum,
    /// In use, as the driver counts. `None` if it does not tell.
    pub(super) driver_used: Option<u64>,
    pub(super) driver_total: Option<u64>,
}

impl DeviceSum {
    /// Returns the bytes in use outside of the pools of these processes: by contexts, other
    /// libraries and other programs. 0 if the pools have grown since the driver has counted.
    pub(super) fn outside(&self) -> Option<u64> {
        self.driver_used.map(|used| used.saturating_sub(self.sum.physical))
    }
}

/// Returns the GPUs of all living processes, and those that only the driver shows.
///
/// Devices are one if their PCI addresses are. A device without one, such as a simulated one, is of
/// its process alone, and no total has it.
pub(super) fn devices<'p>(
    processes: impl Iterator<Item = &'p ProcessStatus>,
    driver: &[DriverCount],
) -> Vec<DeviceSum> {
    let mut found: BTreeMap<GpuAddress, (DeviceSum, Option<&'p PathBuf>)> = BTreeMap::new();
    for count in driver {
        let device = DeviceSum {
            address: count.address_text.clone(),
            name: printable(&count.name),
            processes: 0,
            sum: PoolSum::default(),
            driver_used: count.used,
            driver_total: count.total,
        };
        found.insert(count.address, (device, None));
    }
    for process in processes.filter(|process| process.is_alive) {
        for pool in process.pools.iter().filter(|pool| is_on_device(pool)) {
            let Some(text) = &pool.address else { continue };
            let Some(address) = GpuAddress::parse(text) else { continue };
            let (device, last) = found.entry(address).or_insert_with(|| {
                let device = DeviceSum {
                    address: printable(text),
                    name: printable(&pool.name),
                    processes: 0,
                    sum: PoolSum::default(),
                    driver_used: None,
                    driver_total: None,
                };
                (device, None)
            });
            // The pools of a process come one after the other.
            if *last != Some(&process.path) {
                *last = Some(&process.path);
                device.processes += 1;
            }
            device.sum.add(&PoolSum::of(pool, None));
        }
    }
    found.into_values().map(|(device, _)| device).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_shown_from_the_name_of_their_program_on() {
        for (command, shown) in [
            ("/usr/bin/train --data /x/y", "train --data /x/y"),
            ("train /x", "train /x"),
            ("dir/ x", "dir/ x"),
            ("", ""),
        ] {
            assert_eq!(without_folder(command), shown);
        }
    }

    #[test]
    fn sums_saturate_and_know_only_what_all_parts_know() {
        let part = |physical: u64, limit: Option<u64>, largest_free: Option<u64>| PoolSum {
            pools: 1,
            physical,
            cached: 200,
            limit,
            largest_free,
            rates: Some(Rates { growths: 1.5, ..Rates::default() }),
            ..PoolSum::default()
        };
        let mut sum = PoolSum::default();
        sum.add(&part(10, Some(100), Some(50)));
        assert_eq!((sum.limit, sum.largest_percent()), (Some(100), Some(25)));
        sum.add(&part(u64::MAX, Some(100), Some(90)));
        assert_eq!((sum.pools, sum.physical), (2, u64::MAX));
        assert_eq!((sum.largest_free, sum.largest_percent()), (Some(90), Some(22)));
        assert_eq!(sum.rates.map(|rates| rates.growths), Some(3.0));
        sum.add(&part(0, Some(99), None));
        assert_eq!((sum.largest_free, sum.largest_percent()), (None, None));
        sum.add(&PoolSum { pools: 1, limit: Some(99), ..PoolSum::default() });
        assert_eq!((sum.limit, sum.rates), (None, None));
    }

    #[test]
    fn no_peak_of_several_pools_is_compared_with_the_limit_of_one() {
        let device =
            PoolSum { pools: 1, limit: Some(100), peak: 80, physical: 70, ..PoolSum::default() };
        let mut sum = PoolSum::default();
        sum.add(&device);
        assert_eq!((sum.peak, sum.limit), (80, Some(100)));
        sum.add(&device);
        assert_eq!((sum.peak, sum.limit), (160, None));
    }
}
