//! Values that are boxed on demand.

/// An optional value that is boxed on demand. If it is absent, the drop costs one comparison.
pub(crate) struct LazyBox<T>(Option<Box<T>>);

impl<T> LazyBox<T> {
    pub(crate) const NONE: Self = Self(None);

    pub(crate) fn new(value: T) -> Self {
        Self(Some(Box::new(value)))
    }

    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_none()
    }

    pub(crate) fn get(&self) -> Option<&T> {
        self.0.as_deref()
    }

    pub(crate) fn take(&mut self) -> Self {
        Self(self.0.take())
    }

    pub(crate) fn get_or_default(&mut self) -> &mut T
    where
        T: Default,
    {
        self.0.get_or_insert_default()
    }

    /// Returns the value, or its default.
    pub(crate) fn or_default(mut self) -> T
    where
        T: Default,
    {
        self.0.take().map_or_else(T::default, |value| *value)
    }
}

impl<T> Drop for LazyBox<T> {
    #[inline]
    fn drop(&mut self) {
        if let Some(value) = self.0.take() {
            discard(value);
        }
    }
}

/// Kept out of line, so that the inlined drop stays small.
#[cold]
#[inline(never)]
fn discard<T>(value: Box<T>) {
    drop(value);
}
