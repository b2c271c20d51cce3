//! Sets of CPUs and nodes without a size limit, and the kernel's list format for them.

use std::{error, fmt};

/// A set of small numbers, for CPUs or nodes.
///
/// It grows with its largest member, so it is not limited to 64 nodes or 1024 CPUs. The kernel
/// writes such sets as lists (`0-3,8,10-11`), which [`Bitmap::parse_list`] reads and `Display`
/// writes. An empty text is the empty set, as for a node without CPUs.
///
/// ```
/// use aquifer_host::topology::Bitmap;
/// let cpus = Bitmap::parse_list("0-2,64\n")?;
/// assert_eq!(cpus.iter().collect::<Vec<_>>(), [0, 1, 2, 64]);
/// assert_eq!(cpus.to_string(), "0-2,64");
/// assert!(Bitmap::parse_list("")?.is_empty());
/// # Ok::<(), aquifer_host::topology::ListError>(())
/// ```
#[derive(Clone, Default)]
pub struct Bitmap {
    /// Bit `n % 64` of word `n / 64` is set where `n` is a member.
    words: Vec<u64>,
}

/// Why a text is not a list of numbers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListError {
    /// The part that is neither a number up to [`Bitmap::MAX`] nor a range of such numbers.
    pub part: String,
}

impl fmt::Display for ListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { part } = self;
        write!(f, "{part:?} is neither a number up to {} nor a range of such numbers", Bitmap::MAX)
    }
}

impl error::Error for ListError {}

impl Bitmap {
    /// The largest possible member. A larger number in a text is an error, so that a corrupt text
    /// does not cause a large allocation.
    pub const MAX: u32 = (1 << 16) - 1;

    /// Creates the empty set.
    #[must_use]
    pub const fn new() -> Self {
        Self { words: Vec::new() }
    }

    /// Parses the kernel's list format. White space around parts is ignored, and so are zero bytes
    /// at the end, which some kernels write after the line. An empty text is the empty set.
    ///
    /// # Errors
    /// [`ListError`] with the invalid part.
    pub fn parse_list(text: &str) -> Result<Self, ListError> {
        let mut set = Self::new();
        let text = text.trim_end_matches('\0').trim();
        if text.is_empty() {
            return Ok(set);
        }
        for part in text.split(',').map(str::trim) {
            // `str::parse` would accept a sign.
            let number = |text: &str| {
                let digits = text.trim().bytes().all(|b| b.is_ascii_digit());
                text.trim().parse().ok().filter(|&number| digits && number <= Self::MAX)
            };
            let (start, end) = part.split_once('-').unwrap_or((part, part));
            match (number(start), number(end)) {
                (Some(start), Some(end)) if start <= end => set.extend(start..=end),
                _ => return Err(ListError { part: part.into() }),
            }
        }
        Ok(set)
    }

    /// Adds a member. Returns whether it is new. Numbers above [`Bitmap::MAX`] are not added.
    pub fn insert(&mut self, member: u32) -> bool {
        if member > Self::MAX {
            return false;
        }
        let (word, bit) = Self::position(member);
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        let fresh = self.words[word] & bit == 0;
        self.words[word] |= bit;
        fresh
    }

    /// Returns whether `member` is in the set.
    #[must_use]
    pub fn contains(&self, member: u32) -> bool {
        let (word, bit) = Self::position(member);
        self.words.get(word).is_some_and(|w| w & bit != 0)
    }

    /// An iterator over the members, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.words.iter().zip(0u32..).flat_map(|(&word, index)| {
            (0..64u32).filter(move |bit| word & (1 << bit) != 0).map(move |bit| index * 64 + bit)
        })
    }

    /// Returns the number of members.
    #[must_use]
    pub fn len(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }

    /// Returns whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&w| w == 0)
    }

    /// Returns the members of both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        Self { words: self.words.iter().zip(&other.words).map(|(a, b)| a & b).collect() }
    }

    /// Returns the words of the set in the format of system calls: bit `n % 64` of word `n / 64` is
    /// set if `n` is a member.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    fn position(member: u32) -> (usize, u64) {
        (member as usize / 64, 1 << (member % 64))
    }
}

impl Extend<u32> for Bitmap {
    fn extend<I: IntoIterator<Item = u32>>(&mut self, members: I) {
        for member in members {
            self.insert(member);
        }
    }
}

impl FromIterator<u32> for Bitmap {
    fn from_iter<I: IntoIterator<Item = u32>>(members: I) -> Self {
        let mut set = Self::new();
        set.extend(members);
        set
    }
}

// Not derived: sets with the same members are equal, whatever the number of trailing empty words.
impl PartialEq for Bitmap {
    fn eq(&self, other: &Self) -> bool {
        let (short, long) =
            if self.words.len() < other.words.len() { (self, other) } else { (other, self) };
        let (head, tail) = long.words.split_at(short.words.len());
        head == short.words && tail.iter().all(|&w| w == 0)
    }
}

impl Eq for Bitmap {}

impl fmt::Display for Bitmap {
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

impl fmt::Debug for Bitmap {
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
            let set = Bitmap::parse_list(text).unwrap();
            assert_eq!(set.iter().collect::<Vec<_>>(), members, "{text:?}");
            assert_eq!(set.to_string(), canonical);
            assert_eq!(set.len(), members.len());
            assert_eq!(set, members.into_iter().collect());
        }
    }

    #[test]
    fn malformed_list_is_an_error_with_the_wrong_part() {
        for text in ["a", "1-", "-1", "1,,2", "0x1", "+1", "1-2-3", ",", "99999999999"] {
            assert!(Bitmap::parse_list(text).is_err(), "{text:?}");
        }
        for part in ["5-3", "0-65536", "0-4294967295"] {
            let error = Err(ListError { part: part.into() });
            assert_eq!(Bitmap::parse_list(&format!("0,{part},1")), error);
        }
    }

    #[test]
    fn sets_of_different_lengths_are_compared_and_intersected_by_members() {
        let wide: Bitmap = (0..2000).collect();
        let narrow: Bitmap = [3, 70].into_iter().collect();
        assert_eq!(wide.intersection(&narrow), narrow);
        assert_eq!(narrow.intersection(&wide), narrow);
        assert_eq!(wide.len(), 2000);
        assert!(wide.contains(1999) && !wide.contains(2000) && !narrow.contains(u32::MAX));
        let none = narrow.intersection(&[4].into_iter().collect());
        assert!(none.is_empty());
        assert_eq!(none, Bitmap::new());
    }
}
