//! Two sorted sequences as one.

/// Returns the items of two sequences, each of which is in the order of `key`, in that order. Of
/// equal items, those of the first sequence come first.
pub(crate) fn merged<T, K: Ord>(
    first: impl IntoIterator<Item = T>,
    second: impl IntoIterator<Item = T>,
    key: impl Fn(&T) -> K,
) -> impl Iterator<Item = T> {
    let (mut first, mut second) = (first.into_iter().peekable(), second.into_iter().peekable());
    std::iter::from_fn(move || match (first.peek(), second.peek()) {
        (Some(one), Some(other)) if key(other) < key(one) => second.next(),
        (Some(_), _) => first.next(),
        (None, _) => second.next(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_items_are_in_order_and_equal_ones_in_that_of_the_sequences() {
        let of = |first: &[(u32, char)], second: &[(u32, char)]| -> String {
            merged(first.to_vec(), second.to_vec(), |item| item.0).map(|item| item.1).collect()
        };
        let (low, high) = ([(1, 'a'), (3, 'b'), (3, 'c')], [(2, 'x'), (3, 'y'), (9, 'z')]);
        assert_eq!((of(&low, &high), of(&high, &low)), ("axbcyz".into(), "axybcz".into()));
        assert_eq!(
            (of(&low, &[]), of(&[], &low), of(&[], &[])),
            ("abc".into(), "abc".into(), "".into())
        );
    }
}
