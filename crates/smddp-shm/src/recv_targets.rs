//! Receive targets for `process_vm_readv`.

/// Receive target of each channel: in the call's memory if one was set, else in a buffer of the channel.
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
    /// Removes all targets when another operation begins.
    pub(super) fn clear(&mut self) {
        self.0.iter_mut().for_each(|recv_target| recv_target.bytes = 0);
    }

    fn entry(&mut self, recv_channel: usize) -> &mut RecvTarget {
        if self.0.len() <= recv_channel {
            self.0.resize_with(recv_channel + 1, RecvTarget::default);
        }
        &mut self.0[recv_channel]
    }

    /// Sets the target of `recv_channel`: `bytes` bytes at `at`, with `stride` bytes from one message to the next.
    pub(super) fn set(&mut self, recv_channel: usize, at: *mut u8, bytes: usize, stride: usize) {
        let recv_target = self.entry(recv_channel);
        (recv_target.at, recv_target.bytes, recv_target.stride) = (at.expose_provenance(), bytes, stride);
    }

    /// Adjusts the targets after their memory has moved.
    pub(super) fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        for recv_target in self.0.iter_mut().filter(|recv_target| recv_target.bytes > 0) {
            recv_target.at = moved(std::ptr::with_exposed_provenance_mut(recv_target.at)).expose_provenance();
        }
    }

    /// Returns the memory for `bytes` bytes of a channel's payload at offset `first`. `slot_bytes`: stride of the writer's messages in
    /// bytes.
    pub(super) fn address_of(
        &mut self,
        recv_channel: usize,
        slot_bytes: usize,
        first: usize,
        bytes: usize,
    ) -> *mut u8 {
        let recv_target = self.entry(recv_channel);
        let offset = recv_target.stride == slot_bytes || first == 0;
        if offset && first.checked_add(bytes).is_some_and(|end| end <= recv_target.bytes) {
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
    fn messages_outside_the_target_go_to_a_channel_buffer() {
        let mut out = vec![0_u8; 100];
        let at = out.as_mut_ptr();
        let mut recv_targets = RecvTargets::default();
        let offset = |place: *mut u8| (place as usize).wrapping_sub(at as usize);
        assert!(offset(recv_targets.address_of(3, 40, 0, 40)) > 100, "no target is set");
        recv_targets.set(3, at, 100, 40);
        assert_eq!([0, 40, 80].map(|first| offset(recv_targets.address_of(3, 40, first, 20))), [0, 40, 80]);
        assert!(offset(recv_targets.address_of(3, 40, 80, 40)) > 100, "beyond the end of the target");
        assert!(offset(recv_targets.address_of(3, 50, 50, 50)) > 100, "another stride");
        assert_eq!(offset(recv_targets.address_of(3, 100, 0, 100)), 0, "the only message");
        recv_targets.clear();
        assert!(offset(recv_targets.address_of(3, 40, 0, 40)) > 100);
    }
}
