//! Staging pool: one per process, shared by all its communicators, grown on demand up to a cap.
//!
//! An operation takes one region and returns it when it ends. The region is reused once its readers are finished,
//! which the region's [`ReleaseCondition`] reports. Every started operation can get its minimum memory, if necessary
//! from the reserve beyond the cap. Therefore groups that are used in different orders on different ranks never wait
//! for each other's memory.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use smddp_base::lock;

use super::layout::{GRAIN, STAGING};
use super::memory::SharedMemory;

/// Reports when the readers of a region are finished.
pub trait ReleaseCondition: Send + Sync {
    /// Returns true if no reader needs the region any more.
    fn released(&self) -> bool;
}

/// Part of the staging memory, from [`Pool::acquire`] until [`Pool::retire`]. Only the pool creates regions, and a region cannot be
/// copied, so it has one owner and is retired at most once. A dropped region is never used again.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Region {
    offset: usize,
    bytes: usize,
}

impl Region {
    /// Returns the offset in the shared memory of the process, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Region for an operation.
enum Chosen {
    Ready(Region),
    /// Its pages have to be populated.
    Fresh(Region),
}

struct Idle {
    region: Region,
    owner: u64,
    release: Option<Arc<dyn ReleaseCondition>>,
    /// Return order: the highest value was returned last.
    age: u64,
}

impl Idle {
    fn released(&mut self) -> bool {
        if self.release.as_ref().is_some_and(|r| r.released()) {
            self.release = None;
        }
        self.release.is_none()
    }
}

#[derive(Default)]
struct Ranges {
    /// Free ranges below the cap, by offset.
    free: BTreeMap<usize, usize>,
    reserve: BTreeMap<usize, usize>,
    idle: Vec<Idle>,
    age: u64,
}

/// Allocator of staging memory. A region is reused when its readers are finished.
pub struct Pool {
    state: Mutex<Ranges>,
    cap: usize,
    reserve: usize,
    /// Bytes below the cap that were ever used and are resident, and bytes of the reserve in use.
    resident: AtomicUsize,
    reserve_used: AtomicUsize,
}

/// Returns the bytes of regions that a communicator cycles through before it reuses one; well below a third-level
/// cache.
fn rotation_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        // "1024K"
        let text =
            std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index2/size").unwrap_or_default();
        let kib = text.trim().strip_suffix('K').and_then(|kib| kib.parse::<usize>().ok()).unwrap_or(1 << 10);
        bytes_per_rotation(&first_processor(), kib << 10)
    })
}

/// Returns the beginning of the first processor's description in /proc/cpuinfo.
fn first_processor() -> String {
    let mut text = [0; 128];
    let read = std::fs::File::open("/proc/cpuinfo").and_then(|mut file| file.read(&mut text)).unwrap_or(0);
    String::from_utf8_lossy(&text[..read]).into_owned()
}

/// Computes the bytes of `rotation_bytes` from measurements. On AMD processors (Zen 4), writing a slot that its
/// readers still have cached costs several times the copy. For 128 KiB it takes 14 us, and 3.3 us after the readers'
/// copies are evicted. Therefore the rotation is twice a second-level cache. On Intel processors (Cascade Lake) that
/// effect is absent, and a slot in the writer's cache is faster to write. A quarter of a second-level cache is up to
/// twice as fast as twice one. Other processors were not measured.
fn bytes_per_rotation(processor: &str, second_level: usize) -> usize {
    let bytes = if processor.contains("GenuineIntel") { second_level / 4 } else { 2 * second_level };
    bytes.clamp(256 << 10, 4 << 20)
}

/// Unit of the cap and of regions for collectives, in bytes.
const COARSE: usize = 4 * GRAIN;

/// Selects one call in eight to take new pages, not in step with groups that alternate. The first touch of pages,
/// here and by the readers, costs more than several uses of a known region. Measured for the first calls of
/// all_gather (256 KiB, two ranks): 187 us without this limit, 52 us with it.
fn takes_new_pages(age: u64) -> bool {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    age.wrapping_mul(GOLDEN) >> 61 == 0
}

pub(super) fn take(free: &mut BTreeMap<usize, usize>, bytes: usize) -> Option<usize> {
    let (&offset, &len) = free.iter().find(|&(_, &len)| len >= bytes)?;
    free.remove(&offset);
    if len > bytes {
        free.insert(offset + bytes, len - bytes);
    }
    Some(offset)
}

pub(super) fn give(free: &mut BTreeMap<usize, usize>, mut offset: usize, mut bytes: usize) {
    if let Some((&before, &len)) = free.range(..offset).next_back()
        && before + len == offset
    {
        free.remove(&before);
        offset = before;
        bytes += len;
    }
    if let Some(after) = free.remove(&(offset + bytes)) {
        bytes += after;
    }
    free.insert(offset, bytes);
}

impl Pool {
    /// Creates a pool that may grow to `cap` bytes (rounded up to its unit), with `reserve` bytes behind them.
    pub(crate) fn new(cap: usize, reserve: usize) -> Self {
        let cap = cap.next_multiple_of(COARSE);
        let mut state = Ranges::default();
        if cap > 0 {
            state.free.insert(STAGING, cap);
        }
        state.reserve.insert(STAGING + cap, reserve);
        Self {
            state: Mutex::new(state),
            cap,
            reserve,
            resident: AtomicUsize::new(0),
            reserve_used: AtomicUsize::new(0),
        }
    }

    /// Returns the bytes of address space behind `STAGING`.
    pub(crate) fn span(cap: usize, reserve: usize) -> usize {
        cap.next_multiple_of(COARSE) + reserve
    }

    /// Returns the size of the largest possible region: everything below the cap, or the whole reserve.
    pub(crate) fn max_region(&self) -> usize {
        self.cap.max(self.reserve)
    }

    /// Returns (cap, resident below the cap, in use of the reserve) in bytes.
    pub(crate) fn usage(&self) -> (usize, usize, usize) {
        (self.cap, self.resident.load(Ordering::Relaxed), self.reserve_used.load(Ordering::Relaxed))
    }

    /// Returns `want` bytes for `owner`, or at least `least` bytes. `None` if the owner should wait for its own
    /// regions, or if the reserve is exhausted.
    pub fn acquire(&self, memory: &SharedMemory, owner: u64, want: usize, least: usize) -> Option<Region> {
        self.populate(memory, self.choose(owner, want, least)?)
    }

    fn choose(&self, owner: u64, want: usize, least: usize) -> Option<Chosen> {
        let (want, least) = (want.next_multiple_of(COARSE), least.next_multiple_of(GRAIN));
        let mut state = lock(&self.state);
        let state = &mut *state;

        let rotation_bytes = rotation_bytes().min(self.cap / 8);
        let mut mine: Option<usize> = None;
        let (mut waiting, mut total) = (0, want);
        for i in 0..state.idle.len() {
            if state.idle[i].owner != owner || state.idle[i].region.bytes < want {
                continue;
            }
            total += state.idle[i].region.bytes;
            if !state.idle[i].released() {
                waiting += state.idle[i].region.bytes;
            } else if mine.is_none_or(|m| state.idle[i].age < state.idle[m].age) {
                mine = Some(i);
            }
        }
        if let Some(i) = mine
            && (total > rotation_bytes || !takes_new_pages(state.age))
        {
            return Some(Chosen::Ready(state.idle.swap_remove(i).region));
        }
        if waiting > 0 && waiting + want > rotation_bytes {
            return None;
        }
        if let Some(region) = self.allocate(state, want) {
            return Some(Chosen::Fresh(region));
        }
        if let Some(i) = mine {
            return Some(Chosen::Ready(state.idle.swap_remove(i).region));
        }
        self.evict(state, None);
        if let Some(region) = self.allocate(state, want).or_else(|| self.allocate(state, least)) {
            return Some(Chosen::Fresh(region));
        }
        self.take_reserve(state, least)
    }

    /// Returns memory of one message. Unlike `acquire`, never makes the owner wait for its own regions, because
    /// messages are read in any order.
    pub fn acquire_for_message(
        &self,
        memory: &SharedMemory,
        owner: u64,
        want: usize,
        least: usize,
    ) -> Option<Region> {
        self.populate(memory, self.choose_for_message(owner, want, least)?)
    }

    fn choose_for_message(&self, owner: u64, want: usize, least: usize) -> Option<Chosen> {
        let (want, least) = (want.next_multiple_of(GRAIN), least.next_multiple_of(GRAIN));
        let mut state = lock(&self.state);
        let state = &mut *state;
        let fits = |i: &Idle| i.owner == owner && i.region.bytes >= want && i.region.bytes <= 2 * want;
        for i in 0..state.idle.len() {
            if fits(&state.idle[i]) && state.idle[i].released() {
                return Some(Chosen::Ready(state.idle.swap_remove(i).region));
            }
        }
        if let Some(region) = self.allocate(state, want) {
            return Some(Chosen::Fresh(region));
        }
        self.evict(state, None);
        if let Some(region) = self.allocate(state, want) {
            return Some(Chosen::Fresh(region));
        }
        self.take_reserve(state, least)
    }

    fn take_reserve(&self, state: &mut Ranges, bytes: usize) -> Option<Chosen> {
        let offset = take(&mut state.reserve, bytes)?;
        self.reserve_used.fetch_add(bytes, Ordering::Relaxed);
        Some(Chosen::Ready(Region { offset, bytes }))
    }

    /// Touches the pages of a new region, without the lock: a large region takes milliseconds, and other threads
    /// acquire regions meanwhile.
    fn populate(&self, memory: &SharedMemory, chosen: Chosen) -> Option<Region> {
        match chosen {
            Chosen::Ready(region) => Some(region),
            Chosen::Fresh(region) => {
                #[cfg(test)]
                tests::POPULATING.with(|hook| hook.get().map(|hook| hook(self)));
                memory.populate(region.offset, region.bytes, true);
                Some(region)
            }
        }
    }

    fn allocate(&self, state: &mut Ranges, bytes: usize) -> Option<Region> {
        let offset = take(&mut state.free, bytes)?;
        self.resident.fetch_max(offset + bytes - STAGING, Ordering::Relaxed);
        Some(Region { offset, bytes })
    }

    /// Moves idle regions below the cap that have no readers to the free ranges: those of all owners, or of one.
    fn evict(&self, state: &mut Ranges, of: Option<u64>) {
        let mut i = 0;
        while i < state.idle.len() {
            let idle = &mut state.idle[i];
            let below_cap = idle.region.offset < STAGING + self.cap;
            if below_cap && of.is_none_or(|owner| owner == idle.owner) && idle.released() {
                let region = state.idle.swap_remove(i).region;
                give(&mut state.free, region.offset, region.bytes);
            } else {
                i += 1;
            }
        }
    }

    /// Returns a region; it is reused once `release` is met. A region is retired once, after its owner's last access, and only at the
    /// pool that it is from. `release` must not be met while another process may access the region.
    pub fn retire(
        &self,
        memory: &SharedMemory,
        owner: u64,
        region: Region,
        release: Arc<dyn ReleaseCondition>,
    ) {
        let mut state = lock(&self.state);
        state.age += 1;
        let age = state.age;
        state.idle.push(Idle { region, owner, release: Some(release), age });
        self.sweep_reserve(&mut state, memory);
    }

    /// Returns memory beyond the cap to the system as soon as possible.
    fn sweep_reserve(&self, state: &mut Ranges, memory: &SharedMemory) {
        let mut i = 0;
        while i < state.idle.len() {
            if state.idle[i].region.offset >= STAGING + self.cap && state.idle[i].released() {
                let region = state.idle.swap_remove(i).region;
                if !memory.pinned() {
                    memory.discard(region.offset, region.bytes);
                }
                self.reserve_used.fetch_sub(region.bytes, Ordering::Relaxed);
                give(&mut state.reserve, region.offset, region.bytes);
            } else {
                i += 1;
            }
        }
    }

    /// Marks all pages of `memory` as possibly mapped by a device. Takes the lock, so that a concurrent `discard` has
    /// finished.
    pub fn pin(&self, memory: &SharedMemory) {
        let _state = lock(&self.state);
        memory.pin();
    }

    /// Removes the ownership of a closed group's regions; any group may use them once they are released.
    pub fn disown(&self, memory: &SharedMemory, owner: u64) {
        let mut state = lock(&self.state);
        for idle in &mut state.idle {
            if idle.owner == owner {
                idle.owner = 0;
            }
        }
        self.evict(&mut state, Some(0));
        self.sweep_reserve(&mut state, memory);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::AtomicBool;

    use super::super::layout::RESERVE_BYTES;
    use super::*;

    thread_local! {
        /// Hook that runs before this thread populates pages.
        pub(super) static POPULATING: Cell<Option<fn(&Pool)>> = const { Cell::new(None) };
    }

    #[test]
    fn pages_are_populated_without_the_pool_lock() {
        thread_local! {
            static CALLS: Cell<usize> = const { Cell::new(0) };
        }
        let memory = memory(8 << 20);
        let pool = Pool::new(8 << 20, RESERVE_BYTES);
        POPULATING.set(Some(|pool| {
            assert!(pool.state.try_lock().is_ok(), "the pool is locked while pages are populated");
            CALLS.set(CALLS.get() + 1);
        }));
        assert!(pool.acquire(&memory, 1, 1 << 20, 4096).is_some());
        assert!(pool.acquire_for_message(&memory, 1, 1 << 20, 4096).is_some());
        POPULATING.set(None);
        assert_eq!(CALLS.get(), 2);
    }

    struct Flag(AtomicBool);
    impl ReleaseCondition for Flag {
        fn released(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
    }

    fn memory(cap: usize) -> SharedMemory {
        SharedMemory::create(STAGING + Pool::span(cap, RESERVE_BYTES)).unwrap().0
    }

    #[test]
    fn started_operations_get_their_minimum_memory_when_the_cap_is_exhausted() {
        let memory = memory(1 << 20);
        let pool = Pool::new(1 << 20, RESERVE_BYTES);
        let regions: Vec<_> =
            (1..40).map(|owner| pool.acquire(&memory, owner, 256 << 10, 32 << 10).unwrap()).collect();
        for (i, a) in regions.iter().enumerate() {
            for b in &regions[i + 1..] {
                assert!(a.offset + a.bytes <= b.offset || b.offset + b.bytes <= a.offset);
            }
        }
        assert_eq!(pool.usage().0, 1 << 20);
        assert!(pool.usage().2 > 0);
        for (owner, region) in (1..40).zip(regions) {
            pool.retire(&memory, owner, region, Arc::new(Flag(AtomicBool::new(true))));
        }
        assert_eq!(pool.usage().2, 0, "the reserve was not returned to the system");
    }

    #[test]
    fn region_is_not_reused_before_its_readers_are_finished() {
        let memory = memory(8 << 20);
        let pool = Pool::new(8 << 20, RESERVE_BYTES);
        let first = pool.acquire(&memory, 1, 3 << 20, 4096).unwrap();
        let offset = first.offset();
        let flag = Arc::new(Flag(AtomicBool::new(false)));
        pool.retire(&memory, 1, first, flag.clone());
        assert_eq!(pool.acquire(&memory, 1, 3 << 20, 4096), None);
        flag.0.store(true, Ordering::Relaxed);
        assert_eq!(pool.acquire(&memory, 1, 3 << 20, 4096).map(|region| region.offset()), Some(offset));
    }

    #[test]
    fn group_reuses_its_regions_and_occasionally_takes_new_pages() {
        let memory = memory(64 << 20);
        let pool = Pool::new(64 << 20, RESERVE_BYTES);
        let mut seen = Vec::new();
        let mut operations = |count: usize| {
            for _ in 0..count {
                let region = pool.acquire(&memory, 1, 128 << 10, 4096).unwrap();
                if !seen.contains(&region.offset) {
                    seen.push(region.offset);
                }
                pool.retire(&memory, 1, region, Arc::new(Flag(AtomicBool::new(true))));
            }
            seen.len()
        };
        assert!(operations(24) <= 4, "more new regions than expected");
        assert_eq!(
            operations(1_000),
            rotation_bytes() / (128 << 10),
            "not all regions of the rotation are used"
        );
    }

    #[test]
    fn rotation_follows_the_processor_and_its_cache() {
        for (processor, second_level, bytes) in [
            ("vendor_id\t: GenuineIntel\n", 2 << 20, 512 << 10),
            ("vendor_id\t: GenuineIntel\n", 512 << 10, 256 << 10),
            ("vendor_id\t: AuthenticAMD\n", 1 << 20, 2 << 20),
            ("BogoMIPS\t: 2100.00\n", 1 << 20, 2 << 20),
            ("", 8 << 20, 4 << 20),
        ] {
            assert_eq!(bytes_per_rotation(processor, second_level), bytes, "{processor:?}");
        }
    }

    #[test]
    fn freed_ranges_are_merged() {
        let mut free = BTreeMap::from([(0, 100)]);
        let a = take(&mut free, 30).unwrap();
        let b = take(&mut free, 30).unwrap();
        let c = take(&mut free, 40).unwrap();
        assert!(take(&mut free, 1).is_none());
        give(&mut free, a, 30);
        give(&mut free, c, 40);
        give(&mut free, b, 30);
        assert_eq!(free, BTreeMap::from([(0, 100)]));
    }
}
