//! The configuration of a heap.

use core::fmt;

/// The configuration of a heap. All sizes are in bytes.
///
/// ```
/// use aquifer_heap::{Config, Heap};
///
/// // Blocks in registered host memory: no block may cross from one registration to the next.
/// let heap = Heap::new(Config { border: 1 << 30, ..Config::host() });
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
    /// No block or free extent crosses a multiple of this length. A multiple of `unit`. Zero means
    /// no border.
    pub border: u64,
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
        Self { unit: 512, page: 64 << 10, grain: 16 << 20, small_max: 16 << 10, border: 0 }
    }

    /// Returns the configuration for host memory: units of 16 bytes, the alignment of `malloc`, and
    /// slabs of up to 64 KiB for requests of at most 16 KiB.
    ///
    /// The pinned pools of `aquifer-host` use it without these slabs (`small_max: 0`): they have
    /// their own, whose slots are freed without a lock.
    #[must_use]
    pub const fn host() -> Self {
        Self { unit: 16, page: 64 << 10, grain: 64 << 10, small_max: 16 << 10, border: 0 }
    }

    /// Checks that the configuration is valid.
    ///
    /// # Errors
    ///
    /// The first field that violates its documentation.
    pub const fn validate(&self) -> Result<(), ConfigError> {
        if !self.unit.is_power_of_two() {
            return Err(ConfigError::Unit { unit: self.unit });
        }
        if !self.page.is_power_of_two()
            || self.page < self.unit
            || self.page / self.unit > MAX_PAGE_UNITS
        {
            return Err(ConfigError::Page { page: self.page, unit: self.unit });
        }
        if !self.grain.is_power_of_two() || self.grain < self.page {
            return Err(ConfigError::Grain { grain: self.grain, page: self.page });
        }
        if !self.small_max.is_multiple_of(self.unit) || self.small_max > self.page / 2 {
            return Err(ConfigError::SmallMax { small_max: self.small_max, page: self.page });
        }
        if !self.border.is_multiple_of(self.unit) {
            return Err(ConfigError::Border { border: self.border, unit: self.unit });
        }
        Ok(())
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

/// The reason why a [`Config`] is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConfigError {
    /// The unit is not a power of two.
    Unit {
        /// The unit.
        unit: u64,
    },
    /// The page is not a power of two between one unit and 65,536 of them.
    Page {
        /// The page.
        page: u64,
        /// The unit.
        unit: u64,
    },
    /// The grain is not a power of two, or less than a page.
    Grain {
        /// The grain.
        grain: u64,
        /// The page.
        page: u64,
    },
    /// The largest small size is not a multiple of the unit, or is above half a page.
    SmallMax {
        /// The largest small size.
        small_max: u64,
        /// The page.
        page: u64,
    },
    /// The border is not a multiple of the unit.
    Border {
        /// The border.
        border: u64,
        /// The unit.
        unit: u64,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Unit { unit } => write!(f, "unit {unit} is not a power of two"),
            Self::Page { page, unit } => {
                write!(
                    f,
                    "page {page} is not a power of two between 1 and {MAX_PAGE_UNITS} units of {unit}"
                )
            }
            Self::Grain { grain, page } => {
                write!(f, "grain {grain} is not a power of two from page {page} on")
            }
            Self::SmallMax { small_max, page } => {
                write!(
                    f,
                    "small_max {small_max} is not a multiple of the unit, or above half of page {page}"
                )
            }
            Self::Border { border, unit } => {
                write!(f, "border {border} is not a multiple of unit {unit}")
            }
        }
    }
}

impl core::error::Error for ConfigError {}
