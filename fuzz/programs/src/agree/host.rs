//! The host buffers of a program.
#![expect(unsafe_code, reason = "hands out memory that a device reads and writes")]

use super::{FIRST_HALF, HOSTS, HostPart, PAGEABLE};
use crate::program::seeded;
use aquifer_driver::{DeviceId, Driver, HostAccess, Result};
use std::{ptr::NonNull, sync::Arc};

/// A page of ordinary memory. Registrations consist of whole pages.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// Returns zeroed bytes in whole pages, and their stable address.
fn pages(bytes: usize) -> (Vec<Page>, NonNull<u8>) {
    let mut pages = vec![Page([0; 4096]); bytes.div_ceil(size_of::<Page>())];
    let at = NonNull::from(&mut pages[..]).cast();
    (pages, at)
}

/// The host buffers, and what is needed to free them.
pub(super) struct Hosts {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    at: [NonNull<u8>; HOSTS.len()],
    /// Memory that is registered until the end, and dropped after that.
    _registered: Vec<Page>,
    _pageable: Vec<Page>,
    /// Whether everything was freed.
    ended: bool,
}

impl Hosts {
    /// Allocates and registers all buffers.
    pub(super) fn new(driver: &Arc<dyn Driver>, device: DeviceId) -> Result<Self> {
        let (registered, first_half) = pages(HOSTS[FIRST_HALF] + HOSTS[FIRST_HALF + 1]);
        let (unpinned, pageable) = pages(HOSTS[PAGEABLE]);
        // SAFETY: 1. inside the pages.
        let second_half = unsafe { first_half.add(HOSTS[FIRST_HALF]) };
        let first_pinned = driver.host_alloc(device, HOSTS[0], false)?;
        let second_pinned = driver.host_alloc(device, HOSTS[1], false)?;
        let at = [first_pinned, second_pinned, first_half, second_half, pageable];
        for half in [FIRST_HALF, FIRST_HALF + 1] {
            // SAFETY: 1. the pages live until `end`, which unregisters them.
            unsafe { driver.host_register(device, at[half], HOSTS[half]) }?;
        }
        Ok(Self {
            driver: driver.clone(),
            device,
            at,
            _registered: registered,
            _pageable: unpinned,
            ended: false,
        })
    }

    /// Returns the first byte of a part.
    pub(super) fn address(&self, part: HostPart) -> NonNull<u8> {
        // SAFETY: 1. parts are inside their buffers, by construction of the program.
        unsafe { self.at[part.host].add(part.offset) }
    }

    fn note(&self, part: HostPart, access: HostAccess) {
        if let Some(observer) = self.driver.observer() {
            observer.host(self.address(part).as_ptr().addr() as u64, part.bytes as u64, access);
        }
    }

    /// Writes bytes derived from a seed. No queued copy uses the buffer.
    pub(super) fn write(&self, part: HostPart, seed: u64) {
        self.note(part, HostAccess::Write);
        let bytes = seeded(seed, part.bytes);
        // SAFETY: 1. both are as long as the part, and do not overlap. 2. no queued copy uses the
        // buffer.
        unsafe {
            self.address(part)
                .copy_from_nonoverlapping(NonNull::from(&bytes[..]).cast(), part.bytes);
        };
    }

    /// Returns a digest of the buffer's contents. No queued copy uses it.
    pub(super) fn digest(&self, host: usize) -> u64 {
        let part = HostPart { host, offset: 0, bytes: HOSTS[host] };
        self.note(part, HostAccess::Read);
        // SAFETY: 1. readable for its size: pages are zeroed, and the first operations write every
        // buffer in full. 2. no queued copy uses it.
        digest(unsafe { std::slice::from_raw_parts(self.at[host].as_ptr(), HOSTS[host]) })
    }

    /// Frees all buffers. Reports each call to `told`. No copy is queued any more.
    pub(super) fn end(&mut self, mut told: impl FnMut(&'static str, Result<()>)) {
        self.ended = true;
        for (host, bytes) in HOSTS.into_iter().enumerate() {
            self.note(HostPart { host, offset: 0, bytes }, HostAccess::Free);
        }
        // SAFETY: 1. each was returned by the matching call. 2. no copy is queued any more.
        unsafe {
            told("host_free", self.driver.host_free(self.device, self.at[0]));
            told("host_free", self.driver.host_free(self.device, self.at[1]));
            told("host_unregister", self.driver.host_unregister(self.device, self.at[FIRST_HALF]));
            told(
                "host_unregister",
                self.driver.host_unregister(self.device, self.at[FIRST_HALF + 1]),
            );
        }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        if !self.ended {
            // The set-up failed, so nothing has been queued.
            self.end(|_, _| ());
        }
    }
}

/// Returns a hash of the bytes.
pub(super) fn digest(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut digest = bytes.len() as u64;
    let mut mix =
        |word: u64| digest = (digest ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    for word in words {
        mix(u64::from_le_bytes(*word));
    }
    for &byte in rest {
        mix(u64::from(byte));
    }
    digest
}
