//! Placement over devices that are not this process's: the interface, and the devices of a node by
//! its ledgers.

use super::{
    Candidate, Group, NoFit, PlaceError, PlacementRequest, Policy, RejectReason,
    choice::{Choice, Grant, Refusals, only},
    placing::TICK,
};
use aquifer_core::{DeviceId, MemoryError, Result};
use aquifer_driver::{DeviceInfo, Driver};
use aquifer_host::topology::Topology;
use aquifer_status::ledger::{
    Ledger, LedgerError, LedgerMemory, Member, Share, folder_of_environment,
};
use std::{
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// The longest wait in the queue of one device, after which the group queues again.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

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
    /// Why the device cannot be taken. Another one is tried then. [`RejectReason::Free`] is waited
    /// for, other reasons are not.
    fn hold(&self, index: usize, bytes: u64) -> Result<Self::Held, RejectReason>;

    /// Like [`hold`](Self::hold), but waits for the bytes until `deadline`, and only as long as
    /// `go_on` returns `true`. It is to be called every few milliseconds, with no lock held.
    ///
    /// The default tries again every 20 ms. A source that has queues waits in that of the device.
    ///
    /// # Errors
    /// The refusal of the last attempt.
    fn hold_by(
        &self,
        index: usize,
        bytes: u64,
        deadline: Instant,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Self::Held, RejectReason> {
        loop {
            let refused = match self.hold(index, bytes) {
                Ok(held) => return Ok(held),
                Err(refused) => refused,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !go_on() {
                return Err(refused);
            }
            thread::sleep(left.min(TICK));
        }
    }
}

/// What is held for each shard of a group, with its device.
type Placed<S> = Vec<(DeviceId, <S as DeviceSource>::Held)>;

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
        only(self.place_group_in(source, &Group::of(1, place.clone()), turn)?)
    }

    /// Like [`Policy::place_in`], but waits until a device has room or until `deadline`, as
    /// [`Policy::place_group_in_by`] does.
    ///
    /// # Errors
    /// [`PlaceError`] with the state at the deadline. Fails at once if no device could ever have
    /// room.
    pub fn place_in_by<S: DeviceSource + ?Sized>(
        &self,
        source: &S,
        place: &PlacementRequest,
        turn: u64,
        deadline: Option<Instant>,
    ) -> Result<(DeviceId, S::Held), PlaceError> {
        only(self.place_group_in_by(source, &Group::of(1, place.clone()), turn, deadline)?)
    }

    /// Places every shard of a group on devices of `source` as [`Policy::place_in`] does, or none.
    /// What is held is in the order in which the policy takes the devices.
    ///
    /// Devices are chosen as by [`Placer::place_group`](super::Placer::place_group), and held in the
    /// order of their indices. If one refuses, what was held before is dropped, and the choice is
    /// made again without it.
    ///
    /// ```
    /// use aquifer::{Group, PlacementRequest, Policy, placement::LedgerDevices, sim::Sim};
    /// # let folder = std::env::temp_dir().join(format!("aquifer-group-doc-{}", std::process::id()));
    /// let node = LedgerDevices::join(&Sim::h200(4).driver(), Some(&folder))?;
    /// let group = Group::of(4, PlacementRequest::bytes(10 << 30)).on_peers();
    /// let shards = Policy::MostFree.place_group_in(&node, &group, 0)?;
    /// assert_eq!(shards.len(), 4);
    /// # std::fs::remove_dir_all(&folder)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`PlaceError`] with every device and the reason why it was not taken. Nothing is held.
    pub fn place_group_in<S: DeviceSource + ?Sized>(
        &self,
        source: &S,
        group: &Group,
        turn: u64,
    ) -> Result<Vec<(DeviceId, S::Held)>, PlaceError> {
        self.try_group_in(source, group, turn, &mut None)
    }

    /// Like [`Policy::place_group_in`], but waits until there is room for all shards or until
    /// `deadline`. Blocks, with no lock held.
    ///
    /// The group waits at one device at a time, that which lacks bytes and has the most free, and
    /// holds nothing meanwhile: so groups of several processes cannot deadlock. All devices are
    /// looked at every 20 ms.
    ///
    /// # Errors
    /// [`PlaceError`] with the state at the deadline. Fails at once if there can never be room.
    pub fn place_group_in_by<S: DeviceSource + ?Sized>(
        &self,
        source: &S,
        group: &Group,
        turn: u64,
        deadline: Option<Instant>,
    ) -> Result<Vec<(DeviceId, S::Held)>, PlaceError> {
        let mut granted = None;
        loop {
            let refused = match self.try_group_in(source, group, turn, &mut granted) {
                Err(PlaceError::Nowhere(refused)) => refused,
                decided => return decided,
            };
            // Nothing is held while the group waits.
            drop(granted.take());
            let left = deadline.map_or(LONGEST_WAIT, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            if left.is_zero() || !group.is_satisfiable(source.candidates()) {
                return Err(PlaceError::Nowhere(refused));
            }
            let Some(index) = device_to_wait_at(&refused, None) else {
                thread::sleep(left.min(TICK));
                continue;
            };
            let mut looked = Instant::now();
            let until = looked + left.min(LONGEST_WAIT);
            let mut go_on = || {
                if looked.elapsed() < TICK {
                    return true;
                }
                looked = Instant::now();
                let (devices, refusals) = (source.candidates(), Refusals::new());
                let choice = Choice { policy: self, group, turn };
                let Ok(None) = choice.choose(devices.clone(), None, &refusals) else {
                    return false;
                };
                let refused = group.no_fit(devices.into_iter().map(|d| (d, None)), &refusals);
                device_to_wait_at(&refused, Some(index)) == Some(index)
            };
            let needs = group.each.needs();
            let held = source.hold_by(index, needs, until, &mut go_on).ok();
            // More than the shard's bytes were a condition only. They are not kept.
            let held = held.filter(|_| needs == group.each.size());
            granted = held.map(|held| Grant { index, generation: None, bytes: needs, held });
        }
    }

    /// Places a group. It may use what is `granted`.
    fn try_group_in<S: DeviceSource + ?Sized>(
        &self,
        source: &S,
        group: &Group,
        turn: u64,
        granted: &mut Option<Grant<S::Held>>,
    ) -> Result<Placed<S>, PlaceError> {
        if group.is_empty() {
            return Err(PlaceError::ZeroSize);
        }
        let (choice, mut refusals) = (Choice { policy: self, group, turn }, Refusals::new());
        let hold = |device: &Candidate<'_>| source.hold(device.index, group.each.size());
        match choice.hold_all(|| source.candidates(), granted, &mut refusals, hold)? {
            Some(held) => Ok(held.into_iter().map(|(seen, held)| (seen.device, held)).collect()),
            None => {
                let devices = source.candidates().into_iter().map(|device| (device, None));
                Err(PlaceError::Nowhere(Box::new(group.no_fit(devices, &refusals))))
            }
        }
    }
}

/// Returns the index of the device where a group that was refused waits: the one that lacks bytes
/// and has the most free, or `current` if that has as many. Returns `None` if no device lacks
/// bytes: then a device has to come back.
fn device_to_wait_at(refused: &NoFit, current: Option<usize>) -> Option<usize> {
    let lacking = refused.devices.iter().enumerate().filter(|(_, rejected)| {
        matches!(rejected.why, RejectReason::Free { .. } | RejectReason::Budget(_))
    });
    lacking
        .max_by_key(|&(index, rejected)| (rejected.free, current == Some(index)))
        .map(|(index, _)| index)
}

/// The devices of a node, by what their ledgers let this process claim. It needs no pools: it
/// places work of other processes, such as the actors of a scheduler.
///
/// Processes that [share](crate::RuntimeBuilder::shared) a device see what is held here as claims
/// of this process. Bytes that are held and not yet allocated hide as many
/// [unaccounted](crate::guide::sharing) ones, once claims stand still.
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
    LedgerMemory::gpu(info.uuid, info.pci_address.clone(), ordinal)
}

impl LedgerDevices {
    /// Joins the ledger of each device of the driver, without a guarantee. The folder is that of
    /// `AQUIFER_LEDGER` unless it is given. What is held of a device stays below the cap that
    /// administrators set for this process, see [`Topology::device_cap`].
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] for a ledger that cannot be joined, and for
    /// `AQUIFER_LEDGER=off`; those of [`Topology::device_cap`]; the driver's.
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
        let topology = Topology::read()?;
        let join = |ordinal| {
            let info = driver.device_info(DeviceId(ordinal)).map_err(of)?;
            let name = memory_of(driver, &info).to_string();
            let cap = topology.device_cap(&info)?.value.unwrap_or(u64::MAX);
            let member = Ledger::open(&folder, &name, info.memory)
                .and_then(|ledger| Share::new().limit(cap).join(ledger))
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

    /// Asks the other processes of the device to give back what they hold in caches, and takes
    /// what is released in turn with theirs.
    fn hold_by(
        &self,
        index: usize,
        bytes: u64,
        deadline: Instant,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<LedgerHold, RejectReason> {
        let (_, member) = self.devices.get(index).ok_or(RejectReason::NotNamed)?;
        let claimed = member.claim_while(bytes, deadline, go_on);
        claimed.map_err(|_| RejectReason::Free { needs: bytes })?;
        Ok(LedgerHold { member: member.clone(), bytes })
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
