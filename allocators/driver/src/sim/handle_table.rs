//! A table of objects behind driver handles.

/// A table whose handles contain a generation, so that the handle of a removed object is invalid.
#[derive(Debug)]
pub(crate) struct HandleTable<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Default for HandleTable<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

fn index(handle: u64) -> Option<usize> {
    (handle as u32).checked_sub(1).map(|index| index as usize)
}

impl<T> HandleTable<T> {
    /// Inserts an object and returns its handle, which is never 0.
    pub(crate) fn insert(&mut self, value: T) -> u64 {
        let index = self.free.pop().unwrap_or(self.slots.len() as u32);
        if index as usize == self.slots.len() {
            self.slots.push(Slot { generation: 1, value: None });
        }
        let slot = &mut self.slots[index as usize];
        slot.value = Some(value);
        u64::from(slot.generation) << 32 | u64::from(index + 1)
    }

    pub(crate) fn get(&self, handle: u64) -> Option<&T> {
        let slot = self.slots.get(index(handle)?)?;
        if u64::from(slot.generation) == handle >> 32 { slot.value.as_ref() } else { None }
    }

    pub(crate) fn get_mut(&mut self, handle: u64) -> Option<&mut T> {
        let slot = self.slots.get_mut(index(handle)?)?;
        if u64::from(slot.generation) == handle >> 32 { slot.value.as_mut() } else { None }
    }

    pub(crate) fn remove(&mut self, handle: u64) -> Option<T> {
        let index = index(handle)?;
        let slot = self.slots.get_mut(index)?;
        if u64::from(slot.generation) != handle >> 32 {
            return None;
        }
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index as u32);
        Some(value)
    }

    /// An iterator over the objects, in the order of the slots.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| slot.value.as_ref())
    }

    /// Returns the handles of the objects that satisfy `is`.
    pub(crate) fn handles_where(&self, is: impl Fn(&T) -> bool) -> Vec<u64> {
        let matching =
            self.slots.iter().enumerate().filter(|(_, slot)| slot.value.as_ref().is_some_and(&is));
        matching
            .map(|(index, slot)| u64::from(slot.generation) << 32 | (index as u64 + 1))
            .collect()
    }

    /// A mutable iterator over the objects, in the order of the slots.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| slot.value.as_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handle_of_a_removed_object_is_invalid() {
        let mut table = HandleTable::default();
        let first = table.insert('a');
        assert_eq!(table.remove(first), Some('a'));
        let second = table.insert('b');
        assert_ne!(first, second);
        assert_eq!((table.get(first), table.get(second)), (None, Some(&'b')));
        assert_eq!(table.get(0), None);
    }
}
