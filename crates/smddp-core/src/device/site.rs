//! The driver's side of a group's site on one device: its stream, and the memory it works with.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use smddp_cuda::{Address, Copy, Device, Event, Reduction, Result, Rounding, Wait};
use smddp_transport::SharedPage;

use super::flags::DeviceFlags;
use super::pinned_slots::PinnedSlots;
use super::regions::{Mapping, Regions};
use super::site_handle::DeviceSiteHandle;

/// Device memory of the site's own.
struct Slab {
    at: Address,
    bytes: usize,
    free: bool,
}

/// What only an empty stream may lose.
struct SiteMemory {
    device: Arc<Device>,
    pinned_slots: PinnedSlots,
    regions: Regions,
    slabs: Vec<Slab>,
}

impl Drop for SiteMemory {
    fn drop(&mut self) {
        for slab in &self.slabs {
            // SAFETY: allocated by `DeviceSite::slab`; no stream uses it any more, which whoever drops this has seen to.
            unsafe { self.device.free(slab.at) };
        }
    }
}

/// The driver's side of a site.
pub(crate) struct DeviceSite {
    pub(crate) handle: Arc<DeviceSiteHandle>,
    memory: ManuallyDrop<SiteMemory>,
    /// Last number that the stream writes into this rank's progress word, and into its host's.
    progress: u64,
    passed: u64,
    /// Something was enqueued since.
    has_unmarked_work: bool,
    /// By rank: the progress that the stream waits for already.
    awaited: Vec<u64>,
    /// Not yet enqueued: a write of this rank's progress word, then waits, then copies in any order.
    pending_write: Option<(Address, u64)>,
    waits: Vec<Wait>,
    copies: Vec<Copy>,
    /// The call has few bytes, all in memory that kernels reach.
    pub(crate) is_small: bool,
    /// The end of all that was enqueued before the group failed.
    end: Option<Event>,
}

/// The driver cuts smaller allocations from blocks of this size, and a legacy handle hands out the whole block: mapped
/// twice by one reader, it may be refused.
pub(crate) const MIN_SLAB_BYTES: usize = 2 << 20;

impl DeviceSite {
    /// `first`: device memory of [`MIN_SLAB_BYTES`] bytes, this site's from now on.
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

    /// Whether the stream is past a number of [`Self::host_mark`].
    pub(crate) fn has_passed(&self, number: u64) -> bool {
        self.handle.flags.reached(self.handle.flags.passed(), number)
    }

    /// A pinned slot, as [`PinnedSlots::take`] gives it.
    pub(crate) fn slot(&mut self, bytes: usize, needed: bool) -> Result<Option<usize>> {
        let flags = &self.handle.flags;
        self.memory.pinned_slots.take(bytes, |number| flags.reached(flags.passed(), number), needed)
    }

    /// What `rank` lends under that number, mapped here for operation `number`.
    pub(crate) fn import(&mut self, rank: usize, token: u64, number: u64) -> Result<Arc<Mapping>, String> {
        self.memory.regions.import(rank, token, number)
    }

    /// Device memory of `bytes`, until it is given back.
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

    /// What comes next on the stream is after `event`.
    pub(crate) fn after(&mut self, event: Event) -> Result<()> {
        self.flush()?;
        self.has_unmarked_work = true;
        self.handle.device.wait_event(self.handle.stream, event)
    }

    /// What comes next is after `rank`'s stream wrote `value` into its progress word.
    pub(crate) fn await_progress(&mut self, rank: usize, value: u64) {
        if self.awaited[rank] < value
            && let Some(rank_flags) = self.handle.flags.rank(rank)
        {
            self.awaited[rank] = value;
            self.waits.push(Wait { word: rank_flags.progress(), value });
        }
    }

    /// Waits that were asked for before are enqueued before it; other copies since the last flush are not ordered.
    pub(crate) fn copy(&mut self, to: Address, from: Address, bytes: usize) {
        if bytes > 0 && to != from {
            self.copies.push(Copy { to, from, bytes });
        }
    }

    /// Enqueues what was asked for of words. A number of [`Self::mark`] may be published after it.
    pub(crate) fn flush_flags(&mut self) -> Result<()> {
        self.has_unmarked_work |= !self.waits.is_empty();
        let (device, stream) = (&*self.handle.device, self.handle.stream);
        // SAFETY: words of pages that the handle keeps.
        unsafe { device.write_and_wait_words(stream, self.pending_write.take(), &self.waits, None)? };
        self.waits.clear();
        Ok(())
    }

    pub(crate) fn flush(&mut self) -> Result<()> {
        self.flush_flags()?;
        let (device, stream) = (&*self.handle.device, self.handle.stream);
        if !self.copies.is_empty() {
            self.has_unmarked_work = true;
            // SAFETY: buffers of the call, which its caller keeps until it is over; slots and slabs of this site;
            // peers' memory, whose owners wait for this rank's reads before their operation is over.
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

    /// The number that this rank's progress word reaches once all that was asked for is over. Nobody may wait for it before
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

    /// The same for this rank's host: see [`DeviceSite::has_passed`].
    pub(crate) fn host_mark(&mut self) -> Result<u64> {
        self.flush()?;
        self.passed += 1;
        self.write(self.handle.flags.passed(), self.passed)?;
        Ok(self.passed)
    }

    /// All that was asked for; then a word if there is one `before`, the `waits`, and a last word.
    pub(crate) fn finish(
        &mut self,
        before: Option<(Address, u64)>,
        waits: &[Wait],
        last: (Address, u64),
    ) -> Result<()> {
        self.flush()?;
        self.has_unmarked_work |= !waits.is_empty();
        let (device, stream) = (&*self.handle.device, self.handle.stream);
        // SAFETY: words of pages that the handle keeps.
        unsafe { device.write_and_wait_words(stream, before, waits, Some(last)) }
    }

    pub(crate) fn write(&self, flag: Address, value: u64) -> Result<()> {
        // SAFETY: a word of a page that the handle keeps.
        unsafe { self.handle.device.write_word(self.handle.stream, flag, value) }
    }

    /// The group is dead: nobody waits any more. Done again and again until the stream is empty, which comes back.
    pub(crate) fn release(&mut self) -> bool {
        let DeviceSiteHandle { device, stream, flags, .. } = &*self.handle;
        flags.release();
        if self.end.is_none() {
            self.end = device.create_event().ok().filter(|&event| device.record(event, *stream).is_ok());
        }
        // What cannot be asked is not waited for.
        self.end.is_none_or(|event| device.passed(event).unwrap_or(true))
    }
}

impl Drop for DeviceSite {
    fn drop(&mut self) {
        if let Some(event) = self.end {
            self.handle.device.destroy_event(event);
        }
        if self.handle.wait_drained() {
            // SAFETY: dropped once, here; the stream that used it is empty.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        } else {
            // What the stream may still use is kept, and so is what says that it does.
            std::mem::forget(self.handle.clone());
        }
    }
}
