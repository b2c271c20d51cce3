//! The nodes of a simulated cluster, and what is claimed on their devices.

use aquifer::placement::RejectReason;
use aquifer_ledger::{Ledger, LedgerError, Member, Share};
use std::{
    cell::{Cell, RefCell},
    env, fs,
    path::{Path, PathBuf},
    process,
    rc::Rc,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

/// Devices of a node, which are peers of each other.
pub(super) const DEVICES: usize = 8;
/// Bytes of a device.
pub(super) const CAPACITY: u64 = 80 << 30;

/// How claims are accounted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Accounting {
    /// A ledger for each device, and a member for each shard: the files that processes of a node
    /// share.
    Ledgers,
    /// The sums that such ledgers have, without their files.
    Sums,
}

/// A folder of ledgers, removed with the cluster.
#[derive(Debug)]
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _left = fs::remove_dir_all(&self.0);
    }
}

/// The memory of a device.
#[derive(Debug)]
enum DeviceMemory {
    Sum(Cell<u64>),
    /// The agent's own membership, which claims nothing.
    Ledger(Box<Member>),
}

/// A node of the cluster.
#[derive(Debug)]
struct Node {
    is_up: Cell<bool>,
    /// The number of its starts. Claims of an earlier one are gone.
    generation: Cell<u32>,
    /// Whether its figures have changed since the last report.
    has_changed: Cell<bool>,
    devices: Vec<DeviceMemory>,
}

/// All nodes, and the messages to and from them.
#[derive(Debug)]
pub(super) struct Nodes {
    all: Vec<Node>,
    folder: Option<Folder>,
    messages: Cell<u64>,
    claimed: Cell<u64>,
    up: Cell<u64>,
    changed: RefCell<Vec<usize>>,
}

/// The claimed bytes of one process on a device. They are released when this is dropped.
#[derive(Debug)]
pub(super) struct Shard {
    nodes: Rc<Nodes>,
    device: usize,
    generation: u32,
    bytes: u64,
    member: Option<Box<Member>>,
    /// Whether the process runs. Otherwise a drop is the scheduler's, which takes a message.
    runs: bool,
}

fn name_of(device: usize) -> String {
    format!("node-{}-device-{}", device / DEVICES, device % DEVICES)
}

fn join(folder: &Path, device: usize) -> Result<Box<Member>, LedgerError> {
    let ledger = Ledger::open(folder, &name_of(device), CAPACITY)?;
    Share::new().join(ledger).map(Box::new)
}

impl Nodes {
    pub(super) fn new(count: usize, accounting: Accounting) -> Result<Rc<Self>, LedgerError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let folder = (accounting == Accounting::Ledgers).then(|| {
            let number = NUMBER.fetch_add(1, Relaxed);
            Folder(env::temp_dir().join(format!("aquifer-cluster-{}-{number}", process::id())))
        });
        let device = |device: usize| match &folder {
            Some(folder) => join(&folder.0, device).map(DeviceMemory::Ledger),
            None => Ok(DeviceMemory::Sum(Cell::new(0))),
        };
        let node = |node: usize| -> Result<Node, LedgerError> {
            let devices = (node * DEVICES..(node + 1) * DEVICES).map(device);
            Ok(Node {
                is_up: Cell::new(true),
                generation: Cell::new(0),
                has_changed: Cell::new(false),
                devices: devices.collect::<Result<_, LedgerError>>()?,
            })
        };
        let all = (0..count).map(node).collect::<Result<_, LedgerError>>()?;
        Ok(Rc::new(Self {
            all,
            folder,
            messages: Cell::new(0),
            claimed: Cell::new(0),
            up: Cell::new(count as u64),
            changed: RefCell::default(),
        }))
    }

    fn at(&self, device: usize) -> (&Node, &DeviceMemory) {
        let node = &self.all[device / DEVICES];
        (node, &node.devices[device % DEVICES])
    }

    /// Returns the free bytes of a device, as its node's agent reads them.
    pub(super) fn free(&self, device: usize) -> u64 {
        match self.at(device) {
            (node, _) if !node.is_up.get() => 0,
            (_, DeviceMemory::Sum(claimed)) => CAPACITY - claimed.get(),
            (_, DeviceMemory::Ledger(agent)) => agent.room(),
        }
    }

    /// Asks the node of a device to start a process that claims the bytes, and waits for its
    /// answer.
    pub(super) fn claim(self: &Rc<Self>, device: usize, bytes: u64) -> Result<Shard, RejectReason> {
        self.count(2);
        let (node, memory) = self.at(device);
        if !node.is_up.get() {
            return Err(RejectReason::Lost);
        }
        let refused = RejectReason::Free { needs: bytes };
        let member = match memory {
            DeviceMemory::Sum(claimed) if claimed.get() + bytes > CAPACITY => return Err(refused),
            DeviceMemory::Sum(claimed) => {
                claimed.set(claimed.get() + bytes);
                None
            }
            DeviceMemory::Ledger(_) => {
                let Some(folder) = &self.folder else { return Err(RejectReason::Lost) };
                let member = join(&folder.0, device).map_err(|_| RejectReason::Lost)?;
                member.claim(bytes).map_err(|_| refused)?;
                Some(member)
            }
        };
        self.claimed.set(self.claimed.get() + bytes);
        self.change(device);
        let (nodes, generation) = (self.clone(), node.generation.get());
        Ok(Shard { nodes, device, generation, bytes, member, runs: false })
    }

    fn change(&self, device: usize) {
        let number = device / DEVICES;
        if !self.all[number].has_changed.replace(true) {
            self.changed.borrow_mut().push(number);
        }
    }

    /// Returns the nodes whose figures have changed since the last call.
    pub(super) fn take_changed(&self) -> Vec<usize> {
        let changed = self.changed.take();
        changed.iter().for_each(|&node| self.all[node].has_changed.set(false));
        changed
    }

    pub(super) fn count(&self, messages: u64) {
        self.messages.set(self.messages.get() + messages);
    }

    pub(super) fn messages(&self) -> u64 {
        self.messages.get()
    }

    /// Returns the claimed bytes of all nodes, and the capacity of those that are up.
    pub(super) fn use_of_capacity(&self) -> (u64, u64) {
        (self.claimed.get(), self.up.get() * DEVICES as u64 * CAPACITY)
    }

    /// Ends a node with its processes. Returns whether it was up.
    pub(super) fn stop(&self, number: usize) -> bool {
        let node = &self.all[number];
        if !node.is_up.replace(false) {
            return false;
        }
        node.generation.set(node.generation.get() + 1);
        self.up.set(self.up.get() - 1);
        true
    }

    pub(super) fn start(&self, number: usize) {
        self.all[number].is_up.set(true);
        self.up.set(self.up.get() + 1);
        self.change(number * DEVICES);
    }
}

impl Shard {
    /// Starts its process.
    pub(super) fn run(&mut self) {
        self.runs = true;
    }

    pub(super) fn node(&self) -> usize {
        self.device / DEVICES
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        let nodes = &self.nodes;
        // The kernel ends the claim of a process that has died: no member is told anything.
        drop(self.member.take());
        let (node, memory) = nodes.at(self.device);
        if let DeviceMemory::Sum(claimed) = memory {
            claimed.set(claimed.get() - self.bytes);
        }
        nodes.claimed.set(nodes.claimed.get() - self.bytes);
        if node.generation.get() == self.generation {
            nodes.change(self.device);
            nodes.count(u64::from(!self.runs));
        }
    }
}
