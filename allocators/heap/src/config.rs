//! The configuration of a heap.

/// The configuration of a heap. All sizes are in bytes.
///
/// ```
/// use aquifer_heap::{Config, Heap};
///
/// let heap = Heap::new(Config { small_max: 0, ..Config::host() });
/// assert_eq!(heap.config().unit, 16);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// The start and the length of every block are multiples of it. A power of two.
    pub unit: u64,
    /// The maximum length of a slab, except that a slab has at least two slots. A power of two,
    /// from `unit` to 65,536 units.
    pub page: u64,
    /// The granularity of the address map, a power of two. The map stores the first block of each
    /// stretch of this length. A larger grain makes blocks above the small sizes cheaper, but more
    /// blocks are visited to find one by its address alone.
    pub grain: u64,
    /// Requests of at most this size get a slot of a slab. Larger ones get an exact block. A
    /// multiple of `unit`, at most half of `page`. Zero disables slabs.
    pub small_max: u64,
}

impl Config {
    /// Returns the configuration for device memory: units of 512 bytes, the alignment of the
    /// driver's own pools, which kernels rely on, and slabs of up to 64 KiB for requests of at most
    /// 16 KiB.
    ///
    /// The limit of 16 KiB is chosen for speed, since a slot is cheaper than an exact block. It has
    /// little effect on fragmentation. The map has a grain of 16 MiB, since device blocks are freed
    /// by their key, and addresses are looked up only on slow paths.
    #[must_use]
    pub const fn device() -> Self {
        Self { unit: 512, page: 64 << 10, grain: 16 << 20, small_max: 16 << 10 }
    }

    /// Returns the configuration for host memory: units of 16 bytes, the alignment of `malloc`, and
    /// slabs of up to 64 KiB for requests of at most 16 KiB.
    ///
    /// The pinned pools of `aquifer-host` use it without these slabs (`small_max: 0`): they have
    /// their own, whose slots are freed without a lock.
    #[must_use]
    pub const fn host() -> Self {
        Self { unit: 16, page: 64 << 10, grain: 64 << 10, small_max: 16 << 10 }
    }

    /// Checks that the configuration is valid.
    ///
    /// # Errors
    ///
    /// Panics if a field violates its documentation.
    pub(crate) fn check(&self) {
        let Self { unit, page, grain, small_max } = *self;
        assert!(unit.is_power_of_two(), "unit {unit} is not a power of two");
        assert!(
            page.is_power_of_two() && page >= unit && page / unit <= MAX_PAGE_UNITS,
            "page {page} is not a power of two between 1 and {MAX_PAGE_UNITS} units of {unit}"
        );
        assert!(
            grain.is_power_of_two() && grain >= page,
            "grain {grain} is not a power of two from page {page} on"
        );
        assert!(
            small_max.is_multiple_of(unit) && small_max <= page / 2,
            "small_max {small_max} is not a multiple of the unit, or above half of page {page}"
        );
    }
}

impl Default for Config {
    fn default() -> Self {
        Self::device()
    }
}

/// Larger pages would make slabs that a single live block keeps allocated, and exceed the range in
/// which the division by multiplication in `classes` is exact.
const MAX_PAGE_UNITS: u64 = 1 << 16;
