//! Receive targets for `process_vm_readv`.

/// By inlet: in the call's memory, if that was named, or in memory of its own.
#[derive(Default)]
pub(super) struct Landings(Vec<Landing>);

#[derive(Default)]
struct Landing {
    at: usize,
    bytes: usize,
    stride: usize,
    own: Vec<u8>,
}

impl Landings {
    /// Another operation has begun: nothing is named.
    pub(super) fn forget(&mut self) {
        self.0.iter_mut().for_each(|landing| landing.bytes = 0);
    }

    fn of(&mut self, inlet: usize) -> &mut Landing {
        if self.0.len() <= inlet {
            self.0.resize_with(inlet + 1, Landing::default);
        }
        &mut self.0[inlet]
    }

    /// Messages of `inlet` belong into `bytes` at `at`, `stride` from one to the next.
    pub(super) fn name(&mut self, inlet: usize, at: *mut u8, bytes: usize, stride: usize) {
        let landing = self.of(inlet);
        (landing.at, landing.bytes, landing.stride) = (at.expose_provenance(), bytes, stride);
    }

    /// Named memory has moved.
    pub(super) fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        for landing in self.0.iter_mut().filter(|landing| landing.bytes > 0) {
            landing.at = moved(std::ptr::with_exposed_provenance_mut(landing.at)).expose_provenance();
        }
    }

    /// Room for `bytes` of the inlet's payload, `first` bytes behind its beginning, of messages `cell` bytes from one to the next.
    pub(super) fn place(&mut self, inlet: usize, cell: usize, first: usize, bytes: usize) -> *mut u8 {
        let landing = self.of(inlet);
        let named = landing.stride == cell || first == 0;
        if named && first.checked_add(bytes).is_some_and(|end| end <= landing.bytes) {
            return std::ptr::with_exposed_provenance_mut(landing.at + first);
        }
        landing.own.resize(bytes.max(landing.own.len()), 0);
        landing.own.as_mut_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_named_or_is_cut_otherwise_gets_room_of_its_own() {
        let mut out = vec![0_u8; 100];
        let at = out.as_mut_ptr();
        let mut landings = Landings::default();
        let named = |place: *mut u8| (place as usize).wrapping_sub(at as usize);
        assert!(named(landings.place(3, 40, 0, 40)) > 100, "nothing is named");
        landings.name(3, at, 100, 40);
        assert_eq!([0, 40, 80].map(|first| named(landings.place(3, 40, first, 20))), [0, 40, 80]);
        assert!(named(landings.place(3, 40, 80, 40)) > 100, "beyond its end");
        assert!(named(landings.place(3, 50, 50, 50)) > 100, "cut otherwise");
        assert_eq!(named(landings.place(3, 100, 0, 100)), 0, "the only one");
        landings.forget();
        assert!(named(landings.place(3, 40, 0, 40)) > 100);
    }
}
