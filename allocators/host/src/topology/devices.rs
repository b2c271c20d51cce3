//! The locality of devices: the host node nearest to a GPU, the node for host memory that it uses
//! (`Topology::memory_near_device`), and the nodes that are device memory.

use super::{Node, NodeId, Topology, TopologyError, files::wrong_number};
use aquifer_driver::DeviceInfo;
use std::path::PathBuf;

impl Topology {
    /// Adds the driver's information on device memory, which the kernel may lack: nodes that the
    /// driver names as a device's memory have [`Node::device_memory`] set in the result.
    ///
    /// ```
    /// use aquifer::{DeviceId, driver::DeviceInfo, host::Topology};
    /// let mut gpu = DeviceInfo::new(DeviceId(0), "a GPU beside the CPU".into(), 1 << 30);
    /// gpu.memory_node = Some(1);
    /// let topology = Topology::read()?.with_devices([&gpu]);
    /// println!("{} nodes have memory of the host", topology.host_nodes().count());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn with_devices<'a>(mut self, devices: impl IntoIterator<Item = &'a DeviceInfo>) -> Self {
        for device in devices {
            let reported = device.memory_node.map(NodeId);
            // A device that shares the host's memory may name the host's node.
            let named = |node: &&mut Node| Some(node.id) == reported && node.cpus.is_empty();
            if let Some(node) = self.nodes.iter_mut().find(named) {
                node.device_memory = true;
            }
        }
        self
    }

    /// Reads the node that a PCI device is attached to (`/sys/bus/pci/devices/…/numa_node`).
    fn node_of_pci(&self, address: &str) -> Result<Option<NodeId>, TopologyError> {
        let path = PathBuf::from(format!("/sys/bus/pci/devices/{address}/numa_node"));
        let Some(text) = self.files.text(&path)? else { return Ok(None) };
        let number: i64 = text.trim().parse().map_err(|_| wrong_number(&path, text.trim()))?;
        // −1 means unknown.
        Ok(u32::try_from(number).ok().map(NodeId))
    }

    /// Returns the host node nearest to a GPU, from the driver, or else from the kernel by its PCI
    /// address. `None` if neither names one that is online. If the named node is a device's memory,
    /// returns the nearest host node by the kernel's distances.
    ///
    /// # Errors
    /// [`TopologyError::Number`] for a file that contains no number.
    pub fn node_of_device(&self, device: &DeviceInfo) -> Result<Option<NodeId>, TopologyError> {
        let mut node = device.host_node.and_then(|id| self.node(NodeId(id)));
        if node.is_none()
            && let Some(address) = device.pci_address.as_deref().and_then(sysfs_address)
        {
            node = self.node_of_pci(&address)?.and_then(|id| self.node(id));
        }
        Ok(match node {
            Some(node) if Self::is_memory_of(node, device) => {
                self.by_distance(node.id, |node| !Self::is_memory_of(node, device))
            }
            node => node.map(|node| node.id),
        })
    }

    /// Returns the node for host memory that a GPU uses: [`Topology::node_of_device`], or the
    /// nearest node with memory for this process if that node has none.
    ///
    /// # Errors
    /// As [`Topology::node_of_device`].
    pub fn memory_near_device(&self, device: &DeviceInfo) -> Result<Option<NodeId>, TopologyError> {
        let found = self.node_of_device(device)?.and_then(|id| self.node(id));
        Ok(found.and_then(|node| match node.memory_allowed {
            true => Some(node.id),
            false => self.by_distance(node.id, |near| {
                near.memory_allowed && !Self::is_memory_of(near, device)
            }),
        }))
    }

    fn is_memory_of(node: &Node, device: &DeviceInfo) -> bool {
        let its_own = device.memory_node == Some(node.id.0) && node.cpus.is_empty();
        its_own || node.device_memory
    }

    /// Returns the nearest matching node. `None` if the kernel reports no distances.
    fn by_distance(&self, from: NodeId, fits: impl Fn(&Node) -> bool) -> Option<NodeId> {
        let near = self.nearest(from, |node| fits(node) && self.distance(from, node.id).is_some());
        near.map(|node| node.id)
    }
}

/// Returns a PCI address as sysfs writes it, with at least four digits of the domain and in lower
/// case. Drivers also write domains with eight digits, and in upper case.
pub(super) fn sysfs_address(address: &str) -> Option<String> {
    let (domain, rest) = address.trim().split_once(':')?;
    let domain = u32::from_str_radix(domain, 16).ok()?;
    Some(format!("{domain:04x}:{}", rest.to_ascii_lowercase()))
}
