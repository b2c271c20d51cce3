//! Minimises failing programs.

/// Returns the shortest program found for which `fails` returns `true`. First removes parts of it,
/// then reduces its bytes (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing
/// Input", 2002).
///
/// `fails` must return `true` for `bytes`, which is not checked. It is called at most `tries`
/// times.
///
/// ```
/// use aquifer_programs::minimise::minimise;
///
/// let program: Vec<u8> = (0..200).collect();
/// let least = minimise(&program, 10_000, |bytes| bytes.contains(&77) && bytes.len() > 3);
/// assert_eq!(least, [0, 0, 0, 77]);
/// ```
pub fn minimise(bytes: &[u8], tries: usize, mut fails: impl FnMut(&[u8]) -> bool) -> Vec<u8> {
    let mut least = bytes.to_vec();
    let mut left = tries;
    let mut try_one = |candidate: &[u8]| {
        left > 0 && {
            left -= 1;
            fails(candidate)
        }
    };
    // What follows the failing operation is not needed. Cut halves off the end first.
    let mut cut = least.len() / 2;
    while cut > 0 {
        if try_one(&least[..least.len() - cut]) {
            least.truncate(least.len() - cut);
            cut = cut.min(least.len() / 2);
        } else {
            cut /= 2;
        }
    }
    loop {
        let before = least.clone();
        let mut chunk = (least.len() / 2).max(1);
        loop {
            let mut at = 0;
            while at < least.len() {
                let end = (at + chunk).min(least.len());
                let candidate = [&least[..at], &least[end..]].concat();
                if try_one(&candidate) {
                    least = candidate;
                } else {
                    at = end;
                }
            }
            if chunk == 1 {
                break;
            }
            chunk /= 2;
        }
        for at in 0..least.len() {
            // Try zero first, then search for the minimum by bisection.
            let (mut low, mut byte) = (0, 0);
            while byte < least[at] {
                let mut candidate = least.clone();
                candidate[at] = byte;
                if try_one(&candidate) {
                    least = candidate;
                } else {
                    low = byte + 1;
                }
                byte = low.midpoint(least[at]);
            }
        }
        if least == before {
            return least;
        }
    }
}
