//! Devices of the simulated machine.

use crate::{
    Call, CallCounts, DeviceId, DeviceInfo, Devices, Driver, MemoryInfo, Observer, Result,
    sim::{
        Sim,
        machine::{Machine, error_of},
    },
};
use std::sync::{Arc, atomic::Ordering};

// SAFETY: 1. The queues of the device have run before the call returns. 2. The calls of the other
// families use the same configuration. 3. The queues of a lost device never run again.
#[expect(unsafe_code, reason = "implements a trusted trait; holds no unsafe block")]
unsafe impl Devices for Machine {
    fn device_count(&self) -> Result<u32> {
        let state = self.enter(Call::DeviceCount, None)?;
        Ok(state.devices.len() as u32)
    }

    fn device_info(&self, device: DeviceId) -> Result<DeviceInfo> {
        let mut state = self.enter(Call::DeviceInfo, Some(device))?;
        let mut info = state.device(device).map_err(error_of(Call::DeviceInfo))?.info.clone();
        if state.config.peers {
            info.peers = (0..state.devices.len() as u32)
                .map(DeviceId)
                .filter(|other| *other != device)
                .collect();
        }
        Ok(info)
    }

    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        let mut state = self.enter(Call::MemoryInfo, Some(device))?;
        state.release_destroyed_pools();
        let device = state.device(device).map_err(error_of(Call::MemoryInfo))?;
        Ok(MemoryInfo { free: device.info.memory - device.allocated, total: device.info.memory })
    }

    fn driver_version(&self) -> Result<u32> {
        let state = self.enter(Call::DriverVersion, None)?;
        Ok(state.config.driver_version)
    }

    fn is_lost(&self, device: DeviceId) -> bool {
        self.lock().devices.get(device.0 as usize).is_some_and(|device| device.loss_reported)
    }

    fn device_synchronize(&self, device: DeviceId) -> Result<()> {
        let call = Call::DeviceSynchronize;
        let mut state = self.enter(call, Some(device))?;
        state.captures.reject_unsafe_call().map_err(error_of(call))?;
        let mut state = self.run_device(state, device);
        state.device(device).map_err(error_of(call))?;
        state.order_host_after_device(device);
        Ok(())
    }
}

impl Sim {
    /// Returns the driver of this machine.
    #[must_use]
    pub fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.machine) as Arc<dyn Driver>
    }
}

// SAFETY: 1. All families share one state.
#[expect(unsafe_code, reason = "implements a trusted trait; holds no unsafe block")]
unsafe impl Driver for Machine {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn calls(&self) -> &CallCounts {
        &self.calls
    }

    fn observer(&self) -> Option<&dyn Observer> {
        if self.oracle_on.load(Ordering::Relaxed) { Some(self) } else { None }
    }

    fn machine(&self) -> u64 {
        self.machine_id + 1
    }

    fn simulator(self: Arc<Self>) -> Option<Sim> {
        Some(Sim { machine: self })
    }
}
