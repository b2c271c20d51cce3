//! PCI addresses, in the formats of drivers and of sysfs.

use std::{error, fmt, str::FromStr};

/// The address of a device on the PCI bus.
///
/// Drivers write domains with four or eight digits, and letters of either case. sysfs writes at
/// least four digits, and lower case, which is also the format of `Display`.
///
/// ```
/// use aquifer_host::topology::PciAddress;
/// let gpu: PciAddress = "00000000:3B:00.0".parse()?;
/// assert_eq!(gpu.to_string(), "0000:3b:00.0");
/// # Ok::<(), aquifer_host::topology::PciAddressError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PciAddress {
    /// The domain. It is above 65,535 behind some bridges and in some virtual machines.
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device, below 32.
    pub device: u8,
    /// The function, below 8.
    pub function: u8,
}

/// Why a text is not a PCI address.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PciAddressError {
    /// The text does not have the form `domain:bus:device.function`.
    Shape {
        /// The text.
        text: String,
    },
    /// A part has the wrong number of digits, or is not hexadecimal.
    Digits {
        /// Which part: `domain`, `bus`, `device`, `function`.
        part: &'static str,
        /// The part's text.
        text: String,
    },
    /// A part is above its maximum.
    TooLarge {
        /// Which part.
        part: &'static str,
        /// Its value.
        value: u32,
        /// Its maximum.
        max: u32,
    },
}

impl fmt::Display for PciAddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shape { text } => write!(f, "{text:?} is not domain:bus:device.function"),
            Self::Digits { part, text } => write!(f, "{text:?} is no {part} of a PCI address"),
            Self::TooLarge { part, value, max } => {
                write!(f, "PCI {part} {value:#x} is above {max:#x}")
            }
        }
    }
}

impl error::Error for PciAddressError {}

impl FromStr for PciAddress {
    type Err = PciAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let trimmed = text.trim();
        let shape = || PciAddressError::Shape { text: text.into() };
        let (domain, rest) = trimmed.split_once(':').ok_or_else(shape)?;
        let (bus, rest) = rest.split_once(':').ok_or_else(shape)?;
        let (device, function) = rest.split_once('.').ok_or_else(shape)?;
        let number =
            |part: &'static str, digits: std::ops::RangeInclusive<usize>, max: u32, text: &str| {
                let wrong = || PciAddressError::Digits { part, text: text.into() };
                if !digits.contains(&text.len()) || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
                    return Err(wrong());
                }
                let value = u32::from_str_radix(text, 16).map_err(|_| wrong())?;
                if value > max {
                    Err(PciAddressError::TooLarge { part, value, max })
                } else {
                    Ok(value)
                }
            };
        let byte = |part, digits, max, text| {
            // `max` is at most 0xff.
            number(part, digits, max, text).map(|value| value as u8)
        };
        Ok(Self {
            domain: number("domain", 4..=8, u32::MAX, domain)?,
            bus: byte("bus", 2..=2, 0xff, bus)?,
            device: byte("device", 2..=2, 0x1f, device)?,
            function: byte("function", 1..=1, 7, function)?,
        })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domains_of_four_and_eight_digits_in_either_case_are_equal() {
        let gpu = PciAddress { domain: 0, bus: 0xdb, device: 0x1f, function: 7 };
        for text in ["0000:db:1f.7", "0000:DB:1F.7", "00000000:dB:1f.7", " 0000:db:1f.7\n"] {
            assert_eq!(text.parse(), Ok(gpu), "{text:?}");
        }
        let far: PciAddress = "0001A2b3:07:00.1".parse().unwrap();
        assert_eq!(far.domain, 0x1_a2b3);
        assert_eq!(far.to_string(), "1a2b3:07:00.1");
        assert_eq!(far.to_string().parse(), Ok(far));
    }

    #[test]
    fn malformed_address_is_an_error_with_the_wrong_part() {
        for text in ["", "3b:00.0", "0000:3b:00", "0000-3b-00.0", "0000:3b.00.0"] {
            assert!(
                matches!(text.parse::<PciAddress>(), Err(PciAddressError::Shape { .. })),
                "{text:?}"
            );
        }
        for (text, wrong) in [
            ("000:3b:00.0", "domain"),
            ("000000000:3b:00.0", "domain"),
            ("000g:3b:00.0", "domain"),
            ("+000:3b:00.0", "domain"),
            ("0000:3:00.0", "bus"),
            ("0000:3b:0.0", "device"),
            ("0000:3b:00.", "function"),
            ("0000:3b:00.00", "function"),
        ] {
            match text.parse::<PciAddress>() {
                Err(PciAddressError::Digits { part, .. }) => assert_eq!(part, wrong, "{text:?}"),
                other => panic!("{text:?}: {other:?}"),
            }
        }
        assert_eq!(
            "0000:3b:20.0".parse::<PciAddress>(),
            Err(PciAddressError::TooLarge { part: "device", value: 0x20, max: 0x1f })
        );
        assert_eq!(
            "0000:3b:00.8".parse::<PciAddress>(),
            Err(PciAddressError::TooLarge { part: "function", value: 8, max: 7 })
        );
    }
}
