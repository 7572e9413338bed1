//! Container that assigns each entry a small index, which is reused after removal.

/// Entries with reusable indices.
pub(crate) struct Slab<T> {
    entries: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub(crate) fn insert(&mut self, value: T) -> u64 {
        match self.free.pop() {
            Some(at) => {
                self.entries[at] = Some(value);
                at as u64
            }
            None => {
                self.entries.push(Some(value));
                self.entries.len() as u64 - 1
            }
        }
    }

    pub(crate) fn get_mut(&mut self, at: u64) -> Option<&mut T> {
        self.entries.get_mut(usize::try_from(at).ok()?)?.as_mut()
    }

    pub(crate) fn remove(&mut self, at: u64) -> Option<T> {
        let at = usize::try_from(at).ok()?;
        let value = self.entries.get_mut(at)?.take()?;
        self.free.push(at);
        Some(value)
    }

    /// Removes the entries that `which` selects. Their indices are not reused, because peers may still refer to them.
    pub(crate) fn drain_where(&mut self, which: impl Fn(&T) -> bool) -> Vec<T> {
        self.entries.iter_mut().filter_map(|entry| entry.take_if(|value| which(value))).collect()
    }
}
