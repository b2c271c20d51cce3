//! Sets of CPUs and nodes, and the kernel's list format for them.

use std::{collections::BTreeSet, fmt};

/// A set of numbers, of CPUs or nodes.
///
/// It is not limited to 64 nodes or 1024 CPUs. The kernel writes such sets as lists
/// (`0-3,8,10-11`), which [`IdSet::parse_list`] reads and `Display` writes. An empty text is the
/// empty set, as for a node without CPUs.
///
/// ```
/// use aquifer_host::topology::IdSet;
/// let cpus = IdSet::parse_list("0-2,64\n").ok_or("not a list")?;
/// assert_eq!(cpus.iter().collect::<Vec<_>>(), [0, 1, 2, 64]);
/// assert_eq!(cpus.to_string(), "0-2,64");
/// assert_eq!(IdSet::parse_list(""), Some(IdSet::default()));
/// # Ok::<(), &str>(())
/// ```
#[derive(Clone, PartialEq, Eq, Default)]
pub struct IdSet(BTreeSet<u32>);

impl IdSet {
    /// The largest number in a text. A larger one is refused, so that a corrupt text does not
    /// cause a large allocation.
    pub const MAX: u32 = (1 << 16) - 1;

    /// Parses the kernel's list format. White space around parts is ignored, and so are zero bytes
    /// at the end, which some kernels write after the line. An empty text is the empty set. Returns
    /// `None` for a text that is not such a list.
    #[must_use]
    pub fn parse_list(text: &str) -> Option<Self> {
        let mut set = Self::default();
        let text = text.trim_end_matches('\0').trim();
        if text.is_empty() {
            return Some(set);
        }
        for part in text.split(',').map(str::trim) {
            // `str::parse` would accept a sign.
            let number = |text: &str| {
                let digits = text.trim().bytes().all(|b| b.is_ascii_digit());
                text.trim().parse::<u32>().ok().filter(|&number| digits && number <= Self::MAX)
            };
            let (start, end) = part.split_once('-').unwrap_or((part, part));
            match (number(start), number(end)) {
                (Some(start), Some(end)) if start <= end => set.0.extend(start..=end),
                _ => return None,
            }
        }
        Some(set)
    }

    /// Parses the kernel's mask format: hexadecimal words of 32 bits, the highest first, with
    /// commas between them. Otherwise like [`IdSet::parse_list`].
    #[must_use]
    pub(super) fn parse_mask(text: &str) -> Option<Self> {
        let mut set = Self::default();
        let digits = text.trim_end_matches('\0').trim().bytes().rev().filter(|&byte| byte != b',');
        for (place, digit) in (0..).step_by(4).zip(digits) {
            let digit = char::from(digit).to_digit(16)?;
            set.0.extend((0..4).filter(|bit| digit >> bit & 1 == 1).map(|bit| place + bit));
        }
        set.0.last().is_none_or(|&last| last <= Self::MAX).then_some(set)
    }

    /// Returns whether `member` is in the set.
    #[must_use]
    pub fn contains(&self, member: u32) -> bool {
        self.0.contains(&member)
    }

    /// An iterator over the members, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// Returns the number of members.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the members of both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        Self(&self.0 & &other.0)
    }

    /// Returns the set as the bit mask of system calls: bit `n % 64` of word `n / 64` is set if `n`
    /// is a member.
    #[must_use]
    pub fn words(&self) -> Vec<u64> {
        let mut words = vec![0; self.0.last().map_or(0, |last| *last as usize / 64 + 1)];
        self.iter().for_each(|member| words[member as usize / 64] |= 1 << (member % 64));
        words
    }
}

impl FromIterator<u32> for IdSet {
    fn from_iter<I: IntoIterator<Item = u32>>(members: I) -> Self {
        Self(members.into_iter().collect())
    }
}

impl fmt::Display for IdSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut members = self.iter().peekable();
        let mut comma = "";
        while let Some(start) = members.next() {
            let mut end = start;
            while members.next_if_eq(&(end + 1)).is_some() {
                end += 1;
            }
            if start == end {
                write!(f, "{comma}{start}")?;
            } else {
                write!(f, "{comma}{start}-{end}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for IdSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_lists_round_trip() {
        for (text, members, canonical) in [
            ("", vec![], ""),
            ("\n", vec![], ""),
            ("0\n", vec![0], "0"),
            ("0-3", vec![0, 1, 2, 3], "0-3"),
            ("0-1,8-9\n", vec![0, 1, 8, 9], "0-1,8-9"),
            (" 5 , 7 - 8 ", vec![5, 7, 8], "5,7-8"),
            ("63-65", vec![63, 64, 65], "63-65"),
            ("1,0", vec![0, 1], "0-1"),
            ("1500", vec![1500], "1500"),
        ] {
            let set = IdSet::parse_list(text).unwrap();
            assert_eq!(set.iter().collect::<Vec<_>>(), members, "{text:?}");
            assert_eq!(set.to_string(), canonical);
            assert_eq!(set, members.into_iter().collect());
        }
        assert_eq!(IdSet::parse_list("1,64-65").unwrap().words(), [2, 3]);
        assert!(IdSet::default().words().is_empty());
    }

    #[test]
    fn a_mask_is_the_list_of_its_bits() {
        for (text, list) in [
            ("", ""),
            ("00000000,00000000\n", ""),
            ("0f", "0-3"),
            ("00000001,80000000,00000003\n", "0-1,63-64"),
            ("f0\0", "4-7"),
        ] {
            assert_eq!(IdSet::parse_mask(text), IdSet::parse_list(list), "{text:?}");
        }
        let too_large = format!("1{}", "0".repeat(1 << 14));
        for text in ["0x3", "3 4", "-1", &too_large] {
            assert!(IdSet::parse_mask(text).is_none(), "{text:?}");
        }
    }

    #[test]
    fn malformed_list_is_refused() {
        for text in [
            "a",
            "1-",
            "-1",
            "1,,2",
            "0x1",
            "+1",
            "1-2-3",
            ",",
            "99999999999",
            "0,5-3,1",
            "0-65536",
            "0-4294967295",
        ] {
            assert!(IdSet::parse_list(text).is_none(), "{text:?}");
        }
    }
}
