//! Where devices are, and where their memory is.

use super::{
    Found, Node, NodeId, PciAddress, Source, Topology, TopologyError,
    files::{file, wrong_number},
    node::FOLDER,
};
use aquifer_driver::DeviceInfo;
use std::path::PathBuf;

/// The attribute by which the driver names the host's node next to a device.
const HOST_NODE: &str = "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID";
/// The attribute by which it names the node that a device's memory is.
const MEMORY_NODE: &str = "CU_DEVICE_ATTRIBUTE_NUMA_ID";
/// The attribute that says whether a device has memory of its own.
const INTEGRATED: &str = "CU_DEVICE_ATTRIBUTE_INTEGRATED";

/// Where a device's memory is, as the host sees it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DeviceMemory {
    /// Behind a bus: no host page can lie there.
    Apart,
    /// A node of its own, as with GPUs on a coherent link: the kernel hands its pages out like any
    /// other node's.
    Node(NodeId),
    /// The host's: what the one takes, the other lacks, and pinned memory needs no copy.
    Host,
}

impl Topology {
    /// The same with what the driver knows of its devices' memory, which the kernel alone may not:
    /// the nodes that it names hold [`Node::device_memory`] from then on.
    ///
    /// ```
    /// use aquifer_driver::{DeviceId, DeviceInfo};
    /// use aquifer_host::topology::{DeviceMemory, Topology};
    /// let mut gpu = DeviceInfo::new(DeviceId(0), "a GPU beside the CPU".into(), 1 << 30);
    /// gpu.integrated = true;
    /// let topology = Topology::read()?.with_devices([&gpu]);
    /// assert_eq!(topology.memory_of_device(&gpu).value, Some(DeviceMemory::Host));
    /// # Ok::<(), aquifer_host::topology::TopologyError>(())
    /// ```
    #[must_use]
    pub fn with_devices<'a>(mut self, devices: impl IntoIterator<Item = &'a DeviceInfo>) -> Self {
        for device in devices {
            let told = device.memory_node.map(NodeId);
            // A device that shares the host's memory may name the host's node.
            let named = |node: &&mut Node| Some(node.id) == told && node.cpus.is_empty();
            if let Some(node) = self.nodes.iter_mut().find(named) {
                node.device_memory = Found::known(true, Source::Driver(MEMORY_NODE));
            }
        }
        self
    }

    /// Where a device's memory is, at the driver's word. One that names no node may be too old to:
    /// its device's memory is apart for certain only where every node with memory has CPUs, which a
    /// device's never has.
    #[must_use]
    pub fn memory_of_device(&self, device: &DeviceInfo) -> Found<DeviceMemory> {
        if device.integrated {
            return Found::known(DeviceMemory::Host, Source::Driver(INTEGRATED));
        }
        if let Some(node) = device.memory_node {
            return Found::known(DeviceMemory::Node(NodeId(node)), Source::Driver(MEMORY_NODE));
        }
        if self.numa.value == Some(false) {
            return Found::unknown(self.numa.source.clone());
        }
        let apart = self.nodes.iter().all(|node| !node.cpus.is_empty() || node.memory == Some(0));
        Found { value: apart.then_some(DeviceMemory::Apart), source: file(FOLDER) }
    }

    /// The node that a PCI device is attached to, read now (`/sys/bus/pci/devices/…/numa_node`).
    ///
    /// # Errors
    /// [`TopologyError::Number`] for a file that holds no number.
    pub fn node_of_pci(&self, address: PciAddress) -> Result<Found<NodeId>, TopologyError> {
        if self.numa.value == Some(false) {
            return Ok(Found::unknown(self.numa.source.clone()));
        }
        let path = PathBuf::from(format!("/sys/bus/pci/devices/{address}/numa_node"));
        let Some(text) = self.files.text(&path)? else { return Ok(Found::unknown(file(path))) };
        let number: i64 = text.trim().parse().map_err(|_| wrong_number(&path, text.trim()))?;
        // −1 is the kernel's word for unknown; a node that is not online could hold nothing.
        let value = u32::try_from(number).ok().map(NodeId).filter(|&id| self.node(id).is_some());
        Ok(Found { value, source: file(path) })
    }

    /// The host's node nearest to a GPU: the driver's word, else the kernel's for its PCI address,
    /// else unknown. Where they name a node that is a device's memory, the nearest of the host's by
    /// the kernel's distances.
    ///
    /// # Errors
    /// As [`Topology::node_of_pci`].
    pub fn node_of_device(&self, device: &DeviceInfo) -> Result<Found<NodeId>, TopologyError> {
        if self.numa.value == Some(false) {
            return Ok(Found::unknown(self.numa.source.clone()));
        }
        let told = device.host_node.map(NodeId).filter(|&id| self.node(id).is_some());
        let found = match (told, device.pci_address.as_deref().map(str::parse)) {
            (Some(node), _) => Found::known(node, Source::Driver(HOST_NODE)),
            (None, Some(Ok(address))) => self.node_of_pci(address)?,
            (None, _) => Found::unknown(Source::Driver(HOST_NODE)),
        };
        let named = found.value.and_then(|id| self.node(id));
        if !named.is_some_and(|node| Self::is_memory_of(node, device)) {
            return Ok(found);
        }
        Ok(self.by_distance(found, |node| !Self::is_memory_of(node, device)))
    }

    /// The node whose memory host memory for a GPU should be: [`Topology::node_of_device`], or the
    /// nearest to it that has memory for this process where that one has none.
    ///
    /// # Errors
    /// As [`Topology::node_of_pci`].
    pub fn memory_near_device(&self, device: &DeviceInfo) -> Result<Found<NodeId>, TopologyError> {
        let found = self.node_of_device(device)?;
        if found.value.and_then(|id| self.node(id)).is_none_or(|node| node.memory_allowed) {
            return Ok(found);
        }
        Ok(self.by_distance(found, |node| node.memory_allowed && !Self::is_memory_of(node, device)))
    }

    fn is_memory_of(node: &Node, device: &DeviceInfo) -> bool {
        let its_own = device.memory_node == Some(node.id.0) && node.cpus.is_empty();
        its_own || node.device_memory.value == Some(true)
    }

    /// The node nearest to the one found that fits; unknown where the kernel tells no distance.
    fn by_distance(&self, found: Found<NodeId>, fits: impl Fn(&Node) -> bool) -> Found<NodeId> {
        let Some(from) = found.value else { return found };
        let source = file(format!("{FOLDER}/node{}/distance", from.0));
        let near = self.nearest(from, |node| fits(node) && self.distance(from, node.id).is_some());
        Found { value: near.map(|node| node.id), source }
    }
}
