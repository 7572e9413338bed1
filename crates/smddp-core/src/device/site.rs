//! The engine's part of a group's site on one device: its stream, and its memory.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use smddp_cuda::{Address, Copy, Device, Event, Reduction, Result, Rounding, Wait};
use smddp_shm::SharedPage;

use super::flags::DeviceFlags;
use super::pinned_slots::PinnedSlots;
use super::regions::{Mapping, Regions};
use super::site_handle::DeviceSiteHandle;

/// Device memory that the site owns.
struct Slab {
    at: Address,
    bytes: usize,
    free: bool,
}

/// Memory that may be freed only when the stream is empty.
struct SiteMemory {
    device: Arc<Device>,
    pinned_slots: PinnedSlots,
    regions: Regions,
    slabs: Vec<Slab>,
}

impl Drop for SiteMemory {
    fn drop(&mut self) {
        for slab in &self.slabs {
            // SAFETY: allocated by `DeviceSite::slab`. The owner drops this only when no stream uses it.
            unsafe { self.device.free(slab.at) };
        }
    }
}

/// The engine's part of a site.
pub(crate) struct DeviceSite {
    pub(crate) handle: Arc<DeviceSiteHandle>,
    memory: ManuallyDrop<SiteMemory>,
    /// Last numbers that the stream writes to this rank's progress flag, and to the flag for its host.
    progress: u64,
    passed: u64,
    /// True if work was enqueued after the last mark.
    has_unmarked_work: bool,
    /// By rank: the progress that the stream already waits for.
    awaited: Vec<u64>,
    /// Not enqueued yet: a write of this rank's progress flag, then waits, then copies in any order.
    pending_write: Option<(Address, u64)>,
    waits: Vec<Wait>,
    copies: Vec<Copy>,
    /// True if the call has few bytes, all in memory that kernels can access.
    pub(crate) is_small: bool,
    /// End of the work that was enqueued before the group failed.
    end: Option<Event>,
}

/// Minimum allocation. The driver takes smaller ones from blocks of this size, and a legacy handle exports the whole
/// block. A reader that maps a block twice may get an error.
pub(crate) const MIN_SLAB_BYTES: usize = 2 << 20;

impl DeviceSite {
    /// `first`: device memory of [`MIN_SLAB_BYTES`] bytes, which the site takes over.
    pub(crate) fn new(
        handle: Arc<DeviceSiteHandle>,
        shared_page: Option<Arc<SharedPage>>,
        size: usize,
        first: Option<Address>,
    ) -> Self {
        let device = handle.device.clone();
        let memory = SiteMemory {
            pinned_slots: PinnedSlots::new(device.clone()),
            device,
            regions: Regions::new(&handle, shared_page),
            slabs: first.map(|at| Slab { at, bytes: MIN_SLAB_BYTES, free: true }).into_iter().collect(),
        };
        Self {
            handle,
            memory: ManuallyDrop::new(memory),
            progress: 0,
            passed: 0,
            has_unmarked_work: false,
            awaited: vec![0; size],
            pending_write: None,
            waits: Vec::new(),
            copies: Vec::new(),
            is_small: false,
            end: None,
        }
    }

    pub(crate) fn flags(&self) -> &DeviceFlags {
        &self.handle.flags
    }

    pub(crate) fn pinned_slots(&mut self) -> &mut PinnedSlots {
        &mut self.memory.pinned_slots
    }

    pub(crate) fn regions(&mut self) -> &mut Regions {
        &mut self.memory.regions
    }

    /// Returns true if the stream has passed a number of [`Self::host_mark`].
    pub(crate) fn has_passed(&self, number: u64) -> bool {
        self.handle.flags.reached(self.handle.flags.passed(), number)
    }

    /// Returns a pinned slot; see [`PinnedSlots::take`].
    pub(crate) fn slot(&mut self, bytes: usize, needed: bool) -> Result<Option<usize>> {
        let flags = &self.handle.flags;
        self.memory.pinned_slots.take(bytes, |number| flags.reached(flags.passed(), number), needed)
    }

    /// Maps the export `token` of `rank` for operation `number`.
    pub(crate) fn import(&mut self, rank: usize, token: u64, number: u64) -> Result<Arc<Mapping>, String> {
        self.memory.regions.import(rank, token, number)
    }

    /// Returns index and address of device memory of `bytes`, valid until [`Self::release_slabs`].
    pub(crate) fn slab(&mut self, bytes: usize) -> Result<(usize, Address)> {
        let slabs = &mut self.memory.slabs;
        if let Some(index) = slabs.iter().position(|slab| slab.free && slab.bytes >= bytes) {
            slabs[index].free = false;
            return Ok((index, slabs[index].at));
        }
        let bytes = bytes.next_power_of_two().max(MIN_SLAB_BYTES);
        let at = self.handle.device.allocate(bytes)?;
        slabs.push(Slab { at, bytes, free: false });
        Ok((slabs.len() - 1, at))
    }

    pub(crate) fn release_slabs(&mut self, slabs: &[usize]) {
        for &index in slabs {
            self.memory.slabs[index].free = true;
        }
    }

    /// Orders later work on the stream after `event`.
    pub(crate) fn after(&mut self, event: Event) -> Result<()> {
        self.flush()?;
        self.has_unmarked_work = true;
        self.handle.device.wait_event(self.handle.stream, event)
    }

    /// Orders later work after `rank`'s stream has written `value` to its progress flag.
    pub(crate) fn await_progress(&mut self, rank: usize, value: u64) {
        if self.awaited[rank] < value
            && let Some(rank_flags) = self.handle.flags.rank(rank)
        {
            self.awaited[rank] = value;
            self.waits.push(Wait { word: rank_flags.progress(), value });
        }
    }

    /// Adds a copy, which is ordered after the waits added before. Copies between two flushes are not ordered with
    /// each other.
    pub(crate) fn copy(&mut self, to: Address, from: Address, bytes: usize) {
        if bytes > 0 && to != from {
            self.copies.push(Copy { to, from, bytes });
        }
    }

    /// Enqueues pending flag writes and waits. After it, numbers of [`Self::mark`] may be published.
    pub(crate) fn flush_flags(&mut self) -> Result<()> {
        self.has_unmarked_work |= !self.waits.is_empty();
        let (device, stream) = (&*self.handle.device, self.handle.stream);
        // SAFETY: the flags are in pages that the handle keeps.
        unsafe { device.write_and_wait_words(stream, self.pending_write.take(), &self.waits, None)? };
        self.waits.clear();
        Ok(())
    }

    pub(crate) fn flush(&mut self) -> Result<()> {
        self.flush_flags()?;
        let (device, stream) = (&*self.handle.device, self.handle.stream);
        if !self.copies.is_empty() {
            self.has_unmarked_work = true;
            // SAFETY: buffers of the call are valid until it is over. Slots and slabs belong to this site. Peers keep
            // their exported memory until this rank's reads are complete.
            unsafe {
                match self.is_small {
                    true => device.copy_few(stream, &self.copies)?,
                    false => device.copy(stream, &self.copies)?,
                }
            }
            self.copies.clear();
        }
        Ok(())
    }

    pub(crate) fn reduce(&mut self, reduction: &Reduction) -> Result<()> {
        self.flush()?;
        self.has_unmarked_work = true;
        // SAFETY: as in `flush`.
        unsafe { self.handle.device.reduce(self.handle.stream, reduction) }
    }

    pub(crate) fn round(
        &mut self,
        rounding: Rounding,
        places: (Address, Address),
        count: usize,
    ) -> Result<()> {
        self.flush()?;
        self.has_unmarked_work = true;
        // SAFETY: as in `flush`.
        unsafe { self.handle.device.round(self.handle.stream, rounding, places, count) }
    }

    /// Returns the number that this rank's progress flag has once all added work is complete. Publish it only after
    /// the next [`Self::flush_flags`].
    pub(crate) fn mark(&mut self) -> Result<u64> {
        self.flush()?;
        if self.has_unmarked_work
            && let Some(own) = self.handle.flags.own_rank()
        {
            self.progress += 1;
            self.pending_write = Some((own.progress(), self.progress));
            self.has_unmarked_work = false;
        }
        Ok(self.progress)
    }

    /// Like [`Self::mark`] for this rank's host; see [`DeviceSite::has_passed`].
    pub(crate) fn host_mark(&mut self) -> Result<u64> {
        self.flush()?;
        self.passed += 1;
        self.write(self.handle.flags.passed(), self.passed)?;
        Ok(self.passed)
    }

    /// Enqueues all added work, then the write `before`, the `waits` and the write `last`.
    pub(crate) fn finish(
        &mut self,
        before: Option<(Address, u64)>,
        waits: &[Wait],
        last: (Address, u64),
    ) -> Result<()> {
        self.flush()?;
        self.has_unmarked_work |= !waits.is_empty();
        let (device, stream) = (&*self.handle.device, self.handle.stream);
        // SAFETY: the flags are in pages that the handle keeps.
        unsafe { device.write_and_wait_words(stream, before, waits, Some(last)) }
    }

    pub(crate) fn write(&self, flag: Address, value: u64) -> Result<()> {
        // SAFETY: the flag is in a page that the handle keeps.
        unsafe { self.handle.device.write_word(self.handle.stream, flag, value) }
    }

    /// Releases all waits after a failure. Call it repeatedly until it returns true: the stream is empty.
    pub(crate) fn release(&mut self) -> bool {
        let DeviceSiteHandle { device, stream, flags, .. } = &*self.handle;
        flags.release();
        if self.end.is_none() {
            self.end = device.create_event().ok().filter(|&event| device.record(event, *stream).is_ok());
        }
        // Without an event, or if its query fails, the stream counts as empty.
        self.end.is_none_or(|event| device.passed(event).unwrap_or(true))
    }
}

impl Drop for DeviceSite {
    fn drop(&mut self) {
        if let Some(event) = self.end {
            self.handle.device.destroy_event(event);
        }
        if self.handle.wait_drained() {
            // SAFETY: dropped once, here, with an empty stream.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        } else {
            // Leaks the memory that the stream may still use, and the handle that reports its progress.
            std::mem::forget(self.handle.clone());
        }
    }
}
