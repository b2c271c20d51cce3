//! How a heap cuts its range up.

use core::fmt;

/// How a heap cuts its range up. All sizes in bytes.
///
/// ```
/// use aquifer_heap::{Config, Heap};
///
/// // Blocks on registered host memory: no block may cross from one registration to the next.
/// let heap = Heap::new(Config { border: 1 << 30, ..Config::host() });
/// assert_eq!(heap.config().unit, 16);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// Every block starts at a multiple of it and is a multiple of it long. A power of two.
    pub unit: u64,
    /// The length that slabs grow to. A power of two, from `unit` to 65,536 units.
    pub page: u64,
    /// The grain of the address map, a power of two. It notes the first block in each stretch of
    /// this length: the longer that is, the less blocks above the small sizes cost, and the more
    /// of them are looked at to find one by its address alone.
    pub grain: u64,
    /// Requests of at most this size get a slot of a slab, larger ones an exact block. A
    /// multiple of `unit`, at most half of `page`; zero for no slabs at all.
    pub small_max: u64,
    /// No block, and so no free extent, crosses an address that is a multiple of it. A multiple
    /// of `unit`; zero for no border.
    pub border: u64,
}

impl Config {
    /// For device memory: units of 512 bytes, since that is what the driver's own pools align
    /// to and what kernels count on, and slabs of up to 64 KiB for requests of at most 16 KiB.
    ///
    /// On three recorded training and serving programs this needs 1.010, 1.003 and 1.007 times the
    /// peak of live bytes in pages of 2 MiB; without slabs, or with any other limit from 1 to 512
    /// KiB, the figures move by less than 0.005. So the limit decides speed rather than room: a
    /// slot costs a third of what an exact block does.
    ///
    /// The map has a grain of 16 MiB: who frees a device block has its key, and addresses are
    /// looked up on slow paths.
    #[must_use]
    pub const fn device() -> Self {
        Self { unit: 512, page: 64 << 10, grain: 16 << 20, small_max: 16 << 10, border: 0 }
    }

    /// For host memory: units of 16 bytes, the alignment that `malloc` gives, and slabs of up
    /// to 64 KiB for requests of at most 16 KiB.
    #[must_use]
    pub const fn host() -> Self {
        Self { unit: 16, page: 64 << 10, grain: 64 << 10, small_max: 16 << 10, border: 0 }
    }

    /// Whether a heap can work with it.
    ///
    /// # Errors
    ///
    /// The first field that is not as its documentation says.
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

/// More units in a page than this would make slabs that one survivor keeps alive for too long,
/// and is beyond what the division by multiplication in `classes` is exact for.
const MAX_PAGE_UNITS: u64 = 1 << 16;

/// Why a [`Config`] does not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConfigError {
    /// The unit is not a power of two.
    Unit {
        /// What it is.
        unit: u64,
    },
    /// The page is not a power of two between one unit and 65,536 of them.
    Page {
        /// What it is.
        page: u64,
        /// The unit it was measured by.
        unit: u64,
    },
    /// The grain is not a power of two, or less than a page.
    Grain {
        /// What it is.
        grain: u64,
        /// The page it was measured by.
        page: u64,
    },
    /// The largest small size is not a multiple of the unit, or above half a page.
    SmallMax {
        /// What it is.
        small_max: u64,
        /// The page it was measured by.
        page: u64,
    },
    /// The border is not a multiple of the unit.
    Border {
        /// What it is.
        border: u64,
        /// The unit it was measured by.
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
