//! Placement over devices that are not this process's: the interface, and the devices of a node by
//! its ledgers.

use super::{Candidate, NoFit, PlaceError, PlacementRequest, Policy, RejectReason, RejectedDevice};
use aquifer_core::{DeviceId, MemoryError, Result};
use aquifer_driver::{DeviceInfo, Driver};
use aquifer_ledger::{Ledger, LedgerError, LedgerMemory, Member, Share, folder_of_environment};
use std::{path::Path, sync::Arc};

/// Devices that requests are placed on, of this process, of its node or of others.
///
/// Each policy works on any source, see [`Policy::place_in`]. [`LedgerDevices`] is the source of a
/// node. A source of many nodes answers from what their agents last said, and its `hold` asks one
/// of them.
pub trait DeviceSource {
    /// What keeps bytes on a device for a placement until it is dropped.
    type Held;

    /// Returns all devices with their figures of this moment, and indices from 0 on.
    fn candidates(&self) -> Vec<Candidate<'_>>;

    /// Takes all of `bytes` on the device at `index`, or nothing.
    ///
    /// # Errors
    /// Why the device cannot be taken. Another one is tried then.
    fn hold(&self, index: usize, bytes: u64) -> Result<Self::Held, RejectReason>;
}

impl Policy {
    /// Chooses a device of `source` that satisfies `place`, and takes its bytes there. If the
    /// device refuses them, because others were faster, the policy chooses among the rest. `turn`
    /// is the number of requests placed before, for policies that take turns.
    ///
    /// ```
    /// use aquifer::{Driver, PlacementRequest, Policy, placement::LedgerDevices, sim::Sim};
    /// # let folder = std::env::temp_dir().join(format!("aquifer-place-doc-{}", std::process::id()));
    /// let node = LedgerDevices::join(&Sim::h200(2).driver(), Some(&folder))?;
    /// let place = PlacementRequest::bytes(10 << 30);
    /// let (first, held) = Policy::MostFree.place_in(&node, &place, 0)?;
    /// let (second, _held) = Policy::MostFree.place_in(&node, &place, 1)?;
    /// assert_ne!(first, second);
    /// assert!(Policy::MostFree.place_in(&node, &place, 2).is_err());
    /// drop(held);                                 // other processes can claim its bytes again
    /// # std::fs::remove_dir_all(&folder)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`PlaceError`] lists every device and the reason why it was not taken. Nothing is held.
    pub fn place_in<S: DeviceSource + ?Sized>(
        &self,
        source: &S,
        place: &PlacementRequest,
        turn: u64,
    ) -> Result<(DeviceId, S::Held), PlaceError> {
        if place.size() == 0 {
            return Err(PlaceError::ZeroSize);
        }
        let mut devices = source.candidates();
        if let Self::Weighted(weights) = self {
            devices.iter_mut().for_each(|device| device.weight = weights.of(device.device));
        }
        let mut refused: Vec<Option<RejectReason>> =
            devices.iter().map(|device| place.objection(device)).collect();
        loop {
            let left = devices.iter().zip(&refused).filter(|(_, refused)| refused.is_none());
            let left: Vec<Candidate<'_>> = left.map(|(device, _)| *device).collect();
            let picked = self.pick(place, &left, turn, devices.len());
            let picked = picked.and_then(|index| left.iter().find(|device| device.index == index));
            let Some(Candidate { index, device, .. }) = picked.copied() else { break };
            match source.hold(index, place.size()) {
                Ok(held) => return Ok((device, held)),
                Err(why) => {
                    let at = devices.iter().position(|device| device.index == index);
                    if let Some(place) = at.and_then(|at| refused.get_mut(at)) {
                        *place = Some(why);
                    }
                }
            }
        }
        let devices = devices.iter().zip(refused).map(|(candidate, why)| {
            let Candidate { device, generation, free, age, .. } = *candidate;
            let why = why.unwrap_or(RejectReason::NotNamed);
            RejectedDevice { device, generation, free, age, why }
        });
        let (requested, devices) = (place.size(), devices.collect());
        Err(PlaceError::Nowhere(Box::new(NoFit { requested, shards: 1, devices })))
    }
}

/// The devices of a node, by what their ledgers let this process claim. It needs no pools: it
/// places work of other processes, such as the actors of a scheduler.
///
/// Processes that [share](crate::RuntimeBuilder::shared) a device see what is held here as claims
/// of this process. Bytes that are held and not yet allocated hide as many
/// [unaccounted](crate::guide::sharing) ones.
///
/// See [`Policy::place_in`] for an example.
#[derive(Debug)]
pub struct LedgerDevices {
    driver: Arc<dyn Driver>,
    devices: Vec<(DeviceInfo, Arc<Member>)>,
}

/// Bytes of a device that are claimed for a placement, returned by [`Policy::place_in`] over
/// [`LedgerDevices`]. They are released when this is dropped, and by the kernel when the process
/// dies.
#[derive(Debug)]
pub struct LedgerHold {
    member: Arc<Member>,
    bytes: u64,
}

/// Returns which memory a device's ledger is for. Simulated devices are not those of the machine.
pub(crate) fn memory_of(driver: &Arc<dyn Driver>, info: &DeviceInfo) -> LedgerMemory {
    let ordinal = info.device.0;
    if driver.clone().simulator().is_some() {
        return LedgerMemory::Simulated(ordinal);
    }
    match (info.uuid, &info.pci_address) {
        (Some(uuid), _) => LedgerMemory::Uuid(uuid),
        (None, Some(address)) => LedgerMemory::Address(address.clone()),
        (None, None) => LedgerMemory::Ordinal(ordinal),
    }
}

impl LedgerDevices {
    /// Joins the ledger of each device of the driver, without a guarantee. The folder is that of
    /// `AQUIFER_LEDGER` unless it is given.
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] for a ledger that cannot be joined, and for
    /// `AQUIFER_LEDGER=off`; the driver's.
    pub fn join(driver: &Arc<dyn Driver>, folder: Option<&Path>) -> Result<Self> {
        let refused = |value: String| MemoryError::BadSetting {
            name: "the devices of a node",
            value,
            expected: "ledgers that this process can join",
        };
        let refused_by = |error: LedgerError| refused(error.to_string());
        let folder = match folder {
            Some(folder) => folder.to_owned(),
            None => folder_of_environment()
                .map_err(refused_by)?
                .ok_or_else(|| refused("AQUIFER_LEDGER=off".to_owned()))?,
        };
        let of = |error| MemoryError::driver(DeviceId(0), error);
        let count = driver.device_count().map_err(of)?;
        let join = |ordinal| {
            let info = driver.device_info(DeviceId(ordinal)).map_err(of)?;
            let name = memory_of(driver, &info).to_string();
            let member = Ledger::open(&folder, &name, info.memory)
                .and_then(|ledger| Share::new().join(ledger))
                .map_err(refused_by)?;
            Ok((info, Arc::new(member)))
        };
        let devices = (0..count).map(join).collect::<Result<_>>()?;
        Ok(Self { driver: driver.clone(), devices })
    }
}

impl LedgerDevices {
    fn candidate<'a>(
        &self,
        index: usize,
        (info, member): &'a (DeviceInfo, Arc<Member>),
    ) -> Candidate<'a> {
        member.refresh();
        member.measure(|| {
            let memory = self.driver.memory_info(info.device).ok()?;
            Some(memory.total.saturating_sub(memory.free))
        });
        Candidate {
            compute_capability: info.compute_capability,
            peers: &info.peers,
            ..Candidate::new(index, info.device, member.room(), member.limit())
        }
    }
}

impl DeviceSource for LedgerDevices {
    type Held = LedgerHold;

    /// Asks the driver for the bytes in use of each device (`cuMemGetInfo`), as other members do.
    fn candidates(&self) -> Vec<Candidate<'_>> {
        self.devices
            .iter()
            .enumerate()
            .map(|(index, device)| self.candidate(index, device))
            .collect()
    }

    fn hold(&self, index: usize, bytes: u64) -> Result<LedgerHold, RejectReason> {
        let (_, member) = self.devices.get(index).ok_or(RejectReason::NotNamed)?;
        let claimed = member.claim(bytes).map_err(|_| RejectReason::Free { needs: bytes });
        claimed.map(|()| LedgerHold { member: member.clone(), bytes })
    }
}

impl LedgerHold {
    /// Returns the bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for LedgerHold {
    fn drop(&mut self) {
        self.member.release(self.bytes);
    }
}
