//! Receive targets for `process_vm_readv`.

/// By inlet: in the call's memory, if that was named, or in memory of its own.
#[derive(Default)]
pub(super) struct RecvTargets(Vec<RecvTarget>);

#[derive(Default)]
struct RecvTarget {
    at: usize,
    bytes: usize,
    stride: usize,
    own: Vec<u8>,
}

impl RecvTargets {
    /// Another operation has begun: nothing is named.
    pub(super) fn forget(&mut self) {
        self.0.iter_mut().for_each(|recv_target| recv_target.bytes = 0);
    }

    fn of(&mut self, recv_channel: usize) -> &mut RecvTarget {
        if self.0.len() <= recv_channel {
            self.0.resize_with(recv_channel + 1, RecvTarget::default);
        }
        &mut self.0[recv_channel]
    }

    /// Messages of `recv_channel` belong into `bytes` at `at`, `stride` from one to the next.
    pub(super) fn name(&mut self, recv_channel: usize, at: *mut u8, bytes: usize, stride: usize) {
        let recv_target = self.of(recv_channel);
        (recv_target.at, recv_target.bytes, recv_target.stride) = (at.expose_provenance(), bytes, stride);
    }

    /// Named memory has moved.
    pub(super) fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        for recv_target in self.0.iter_mut().filter(|recv_target| recv_target.bytes > 0) {
            recv_target.at = moved(std::ptr::with_exposed_provenance_mut(recv_target.at)).expose_provenance();
        }
    }

    /// Room for `bytes` of the inlet's payload, `first` bytes behind its beginning, of messages `cell` bytes from one to the next.
    pub(super) fn place(&mut self, recv_channel: usize, cell: usize, first: usize, bytes: usize) -> *mut u8 {
        let recv_target = self.of(recv_channel);
        let named = recv_target.stride == cell || first == 0;
        if named && first.checked_add(bytes).is_some_and(|end| end <= recv_target.bytes) {
            return std::ptr::with_exposed_provenance_mut(recv_target.at + first);
        }
        recv_target.own.resize(bytes.max(recv_target.own.len()), 0);
        recv_target.own.as_mut_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_named_or_is_cut_otherwise_gets_room_of_its_own() {
        let mut out = vec![0_u8; 100];
        let at = out.as_mut_ptr();
        let mut recv_targets = RecvTargets::default();
        let named = |place: *mut u8| (place as usize).wrapping_sub(at as usize);
        assert!(named(recv_targets.place(3, 40, 0, 40)) > 100, "nothing is named");
        recv_targets.name(3, at, 100, 40);
        assert_eq!([0, 40, 80].map(|first| named(recv_targets.place(3, 40, first, 20))), [0, 40, 80]);
        assert!(named(recv_targets.place(3, 40, 80, 40)) > 100, "beyond its end");
        assert!(named(recv_targets.place(3, 50, 50, 50)) > 100, "cut otherwise");
        assert_eq!(named(recv_targets.place(3, 100, 0, 100)), 0, "the only one");
        recv_targets.forget();
        assert!(named(recv_targets.place(3, 40, 0, 40)) > 100);
    }
}
