//! The locality of devices and of their memory.

use super::{
    Found, Node, NodeId, PciAddress, Provenance, Topology, TopologyError,
    files::{file, wrong_number},
    node::FOLDER,
};
use aquifer_driver::DeviceInfo;
use std::path::PathBuf;

/// The driver's attribute for the host node nearest to a device.
const HOST_NODE: &str = "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID";
/// The driver's attribute for the node that is a device's memory.
const MEMORY_NODE: &str = "CU_DEVICE_ATTRIBUTE_NUMA_ID";
/// The driver's attribute for devices without memory of their own.
const INTEGRATED: &str = "CU_DEVICE_ATTRIBUTE_INTEGRATED";

/// The location of a device's memory, as seen by the host.
///
/// See [`Topology::with_devices`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DeviceMemory {
    /// Behind a bus. No host page can lie there.
    Apart,
    /// A node of its own, as with GPUs on a coherent link. The kernel allocates its pages like
    /// those of any other node.
    Node(NodeId),
    /// The host's memory. Host and device compete for it, and pinned memory needs no copy.
    Host,
}

impl Topology {
    /// Adds the driver's information on device memory, which the kernel may lack: nodes that the
    /// driver names as a device's memory have [`Node::device_memory`] set in the result.
    ///
    /// ```
    /// use aquifer::{DeviceId, driver::DeviceInfo, host::Topology};
    /// let mut gpu = DeviceInfo::new(DeviceId(0), "a GPU beside the CPU".into(), 1 << 30);
    /// gpu.integrated = true;
    /// let topology = Topology::read()?.with_devices([&gpu]);
    /// println!("its memory: {:?}", topology.memory_of_device(&gpu).value);          // the host's
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn with_devices<'a>(mut self, devices: impl IntoIterator<Item = &'a DeviceInfo>) -> Self {
        for device in devices {
            let reported = device.memory_node.map(NodeId);
            // A device that shares the host's memory may name the host's node.
            let named = |node: &&mut Node| Some(node.id) == reported && node.cpus.is_empty();
            if let Some(node) = self.nodes.iter_mut().find(named) {
                node.device_memory = Found::known(true, Provenance::Driver(MEMORY_NODE));
            }
        }
        self
    }

    /// Returns the location of a device's memory, according to the driver. A driver that names no
    /// node may be too old to do so. The memory is then certainly separate only if every node with
    /// memory has CPUs, because nodes of devices have none.
    #[must_use]
    pub fn memory_of_device(&self, device: &DeviceInfo) -> Found<DeviceMemory> {
        if device.integrated {
            return Found::known(DeviceMemory::Host, Provenance::Driver(INTEGRATED));
        }
        if let Some(node) = device.memory_node {
            return Found::known(DeviceMemory::Node(NodeId(node)), Provenance::Driver(MEMORY_NODE));
        }
        if self.numa.value == Some(false) {
            return Found::unknown(self.numa.source.clone());
        }
        let apart = self.nodes.iter().all(|node| !node.cpus.is_empty() || node.memory == Some(0));
        Found { value: apart.then_some(DeviceMemory::Apart), source: file(FOLDER) }
    }

    /// Reads the node that a PCI device is attached to (`/sys/bus/pci/devices/…/numa_node`).
    ///
    /// # Errors
    /// [`TopologyError::Number`] for a file that contains no number.
    pub fn node_of_pci(&self, address: PciAddress) -> Result<Found<NodeId>, TopologyError> {
        if self.numa.value == Some(false) {
            return Ok(Found::unknown(self.numa.source.clone()));
        }
        let path = PathBuf::from(format!("/sys/bus/pci/devices/{address}/numa_node"));
        let Some(text) = self.files.text(&path)? else { return Ok(Found::unknown(file(path))) };
        let number: i64 = text.trim().parse().map_err(|_| wrong_number(&path, text.trim()))?;
        // −1 means unknown. A node that is not online has no memory.
        let value = u32::try_from(number).ok().map(NodeId).filter(|&id| self.node(id).is_some());
        Ok(Found { value, source: file(path) })
    }

    /// Returns the host node nearest to a GPU, from the driver, or else from the kernel by its PCI
    /// address. Unknown if neither names one. If the named node is a device's memory, returns the
    /// nearest host node by the kernel's distances.
    ///
    /// # Errors
    /// As [`Topology::node_of_pci`].
    pub fn node_of_device(&self, device: &DeviceInfo) -> Result<Found<NodeId>, TopologyError> {
        if self.numa.value == Some(false) {
            return Ok(Found::unknown(self.numa.source.clone()));
        }
        let reported = device.host_node.map(NodeId).filter(|&id| self.node(id).is_some());
        let found = match (reported, device.pci_address.as_deref().map(str::parse)) {
            (Some(node), _) => Found::known(node, Provenance::Driver(HOST_NODE)),
            (None, Some(Ok(address))) => self.node_of_pci(address)?,
            (None, _) => Found::unknown(Provenance::Driver(HOST_NODE)),
        };
        let named = found.value.and_then(|id| self.node(id));
        if !named.is_some_and(|node| Self::is_memory_of(node, device)) {
            return Ok(found);
        }
        Ok(self.by_distance(found, |node| !Self::is_memory_of(node, device)))
    }

    /// Returns the node for host memory that a GPU uses: [`Topology::node_of_device`], or the
    /// nearest node with memory for this process if that node has none.
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

    /// Returns the nearest matching node to the one found. Unknown if the kernel reports no
    /// distances.
    fn by_distance(&self, found: Found<NodeId>, fits: impl Fn(&Node) -> bool) -> Found<NodeId> {
        let Some(from) = found.value else { return found };
        let source = file(format!("{FOLDER}/node{}/distance", from.0));
        let near = self.nearest(from, |node| fits(node) && self.distance(from, node.id).is_some());
        Found { value: near.map(|node| node.id), source }
    }
}
