//! PCI addresses, in the formats of drivers and of sysfs.

use std::{error, fmt, ops::RangeInclusive, str::FromStr};

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

/// A text that is no PCI address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PciAddressError {
    /// The text.
    pub text: String,
}

impl fmt::Display for PciAddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not a PCI address (domain:bus:device.function)", self.text)
    }
}

impl error::Error for PciAddressError {}

impl FromStr for PciAddress {
    type Err = PciAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |digits: RangeInclusive<usize>, max: u32, text: &str| {
            let is_hex = text.bytes().all(|b| b.is_ascii_hexdigit());
            let number = u32::from_str_radix(text, 16).ok().filter(|&number| number <= max);
            number.filter(|_| is_hex && digits.contains(&text.len()))
        };
        let parse = || {
            let (domain, rest) = text.trim().split_once(':')?;
            let (bus, rest) = rest.split_once(':')?;
            let (device, function) = rest.split_once('.')?;
            // The limits of the last three are below 256.
            Some(Self {
                domain: number(4..=8, u32::MAX, domain)?,
                bus: number(2..=2, 0xff, bus)? as u8,
                device: number(2..=2, 0x1f, device)? as u8,
                function: number(1..=1, 7, function)? as u8,
            })
        };
        parse().ok_or_else(|| PciAddressError { text: text.into() })
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
    fn malformed_address_is_an_error_with_the_text() {
        for text in [
            "",
            "3b:00.0",
            "0000:3b:00",
            "0000-3b-00.0",
            "0000:3b.00.0",
            "000:3b:00.0",
            "000000000:3b:00.0",
            "000g:3b:00.0",
            "+000:3b:00.0",
            "0000:3:00.0",
            "0000:3b:0.0",
            "0000:3b:00.",
            "0000:3b:00.00",
            "0000:3b:20.0",
            "0000:3b:00.8",
        ] {
            let error = PciAddressError { text: text.into() };
            assert_eq!(text.parse::<PciAddress>(), Err(error));
        }
    }
}
