//! Memory that ranks show each other: what is lent here, and what of others is mapped here.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use smddp_cuda::{Address, Device, Export, Import, Imported, Kind, Region};
use smddp_transport::fork::PerProcess;
use smddp_transport::{MemoryExport, SharedPage};

use super::site_handle::SiteHandle;
use crate::sync::lock;

/// Several regions of a peer that follow each other there; here each lies somewhere.
pub(crate) struct Mapping {
    device: Arc<Device>,
    parts: Vec<Imported>,
}

impl Mapping {
    /// Where `bytes` bytes at `offset` lie here: (address, bytes), in order; `None`: not all of them do.
    pub(crate) fn pieces(&self, offset: u64, bytes: usize) -> Option<Vec<(Address, usize)>> {
        let (mut skip, mut left) = (offset as usize, bytes);
        let mut pieces = Vec::with_capacity(1);
        for part in &self.parts {
            if left == 0 {
                break;
            }
            if skip >= part.bytes {
                skip -= part.bytes;
                continue;
            }
            let here = left.min(part.bytes - skip);
            pieces.push((part.base + skip as u64, here));
            left -= here;
            skip = 0;
        }
        (left == 0).then_some(pieces)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        for &part in &self.parts {
            self.device.close(part);
        }
    }
}

const LEGACY: u8 = 0;
const MAPPED: u8 = 1;
/// Mappings of others' memory that a site keeps open.
const KEPT: usize = 1024;

/// What one site has mapped of others' memory.
struct Borrowed {
    /// The site's, which knows which operations are over; none: all are.
    handle: Weak<SiteHandle>,
    /// By rank and its number; with the operation that used it last.
    mappings: HashMap<(usize, u64), (Arc<Mapping>, u64)>,
}

impl Borrowed {
    /// Whether no stream uses what operation `used` used last.
    fn idle(&self, used: u64) -> bool {
        self.handle.upgrade().is_none_or(|handle| handle.is_done(used) && !handle.released())
    }

    /// Closes the idle ones that `which` names (rank, last operation).
    fn close(&mut self, which: impl Fn(usize, u64) -> bool) {
        let keys: Vec<_> = self.mappings.iter().map(|(key, (_, used))| (*key, *used)).collect();
        for (key, used) in keys {
            if which(key.0, used) && self.idle(used) {
                self.mappings.remove(&key);
            }
        }
    }
}

/// Those of all sites of this process.
static ALL: PerProcess<Mutex<Vec<Weak<Mutex<Borrowed>>>>> = PerProcess::new();

/// What one site lends and has borrowed.
pub(crate) struct Regions {
    device: Arc<Device>,
    shared_page: Option<Arc<SharedPage>>,
    /// By (address, generation) of the regions.
    lent: HashMap<Vec<(Address, u64)>, u64>,
    borrowed: Arc<Mutex<Borrowed>>,
}

/// An operation that is in the way of a mapping is waited for this long.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// Meanwhile its owner is asked so often whether it is still there.
const ASK: Duration = Duration::from_millis(100);

impl Regions {
    pub(crate) fn new(handle: &Arc<SiteHandle>, shared_page: Option<Arc<SharedPage>>) -> Self {
        let borrowed = Borrowed { handle: Arc::downgrade(handle), mappings: HashMap::new() };
        let borrowed = Arc::new(Mutex::new(borrowed));
        let mut all = lock(ALL.get());
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(&borrowed));
        Self { device: handle.device.clone(), shared_page, lent: HashMap::new(), borrowed }
    }

    /// (number, offset) under which peers find these bytes; `None` for memory that no other process can have.
    pub(crate) fn lend(&mut self, address: Address, bytes: usize) -> smddp_cuda::Result<Option<(u64, u64)>> {
        let Some(shared_page) = &self.shared_page else { return Ok(None) };
        let mut parts: Vec<Region> = Vec::with_capacity(1);
        let mut at = address;
        loop {
            let region = self.device.region(at)?;
            if matches!(region.kind, Kind::Private | Kind::Host) {
                return Ok(None);
            }
            let end = region.base + region.bytes as u64;
            if end <= at {
                return Err(smddp_cuda::Error::Invalid(format!(
                    "the driver gives the memory at {at:#x} no size"
                )));
            }
            parts.push(region);
            if end >= address + bytes as u64 {
                break;
            }
            at = end;
        }
        let offset = address - parts[0].base;
        let key: Vec<_> = parts.iter().map(|region| (region.base, region.generation)).collect();
        if let Some(&token) = self.lent.get(&key) {
            return Ok(Some((token, offset)));
        }
        // What had these addresses before is gone.
        self.lent.retain(|known, token| {
            let gone = known
                .iter()
                .any(|(base, generation)| key.iter().any(|(now, other)| base == now && generation != other));
            if gone {
                shared_page.withdraw(*token);
            }
            !gone
        });
        // What the driver says of memory is not all: it refuses to export what was imported here, say.
        if parts.iter().any(|region| self.device.export(region).is_err()) {
            return Ok(None);
        }
        let device = self.device.clone();
        let token = shared_page.export(Box::new(move || show(&device, &parts)));
        self.lent.insert(key, token);
        Ok(Some((token, offset)))
    }

    /// What `rank` lends under that number, mapped here for operation `now`; it stays mapped until that is over.
    pub(crate) fn borrow(&mut self, rank: usize, token: u64, now: u64) -> Result<Arc<Mapping>, String> {
        if let Some((mapping, used)) = lock(&self.borrowed).mappings.get_mut(&(rank, token)) {
            *used = now;
            return Ok(mapping.clone());
        }
        let shared_page = self.shared_page.as_ref().ok_or("this rank shares memory with nobody")?;
        let ask = || ask(shared_page, rank, token);
        let mapping = match open(&self.device, &ask()?) {
            // What the rank freed may still be mapped here, by any group, and in the way of what has its addresses now:
            // the driver refuses the one while it has the other.
            Err(_) if self.forget(rank, now, || ask().is_ok()) => {
                fetch(&self.device, shared_page, rank, token)?
            }
            Err(error) => return Err(format!("memory of rank {rank}: {error}")),
            Ok(mapping) => mapping,
        };
        let mapping = Arc::new(mapping);
        let mut borrowed = lock(&self.borrowed);
        if borrowed.mappings.len() >= KEPT {
            let oldest = borrowed.mappings.values().map(|(_, used)| *used).min().unwrap_or(now);
            borrowed.close(|_, used| used <= oldest && used < now);
        }
        borrowed.mappings.insert((rank, token), (mapping.clone(), now));
        Ok(mapping)
    }

    /// Closes what is mapped of a rank's memory here, once operations before `now` are over, and what other groups do not
    /// use. (Or one of those has just done so.) A rank that is not `there` any more is not waited for: false.
    fn forget(&self, rank: usize, now: u64, there: impl Fn() -> bool) -> bool {
        let begun = Instant::now();
        let mut asked = begun;
        loop {
            let mut borrowed = lock(&self.borrowed);
            borrowed.close(|owner, used| owner == rank && used < now);
            let left = borrowed.mappings.iter().any(|((owner, _), (_, used))| *owner == rank && *used < now);
            drop(borrowed);
            if !left || begun.elapsed() > LONGEST_WAIT {
                break;
            }
            if asked.elapsed() > ASK {
                if !there() {
                    return false;
                }
                asked = Instant::now();
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        let others: Vec<_> = lock(ALL.get()).iter().filter_map(Weak::upgrade).collect();
        for other in others.into_iter().filter(|other| !Arc::ptr_eq(other, &self.borrowed)) {
            let mut other = lock(&other);
            if other.mappings.values().any(|(mapping, _)| mapping.device.is_beside(&self.device)) {
                other.close(|_, _| true);
            }
        }
        true
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        if let Some(shared_page) = &self.shared_page {
            self.lent.values().for_each(|&token| shared_page.withdraw(token));
        }
    }
}

/// What `rank` lends under that number, mapped.
fn fetch(device: &Arc<Device>, shared_page: &SharedPage, rank: usize, token: u64) -> Result<Mapping, String> {
    let lent = ask(shared_page, rank, token)?;
    open(device, &lent).map_err(|error| format!("memory of rank {rank}: {error}"))
}

fn ask(shared_page: &SharedPage, rank: usize, token: u64) -> Result<MemoryExport, String> {
    shared_page
        .import(rank, token)
        .map_err(|error| format!("rank {rank} does not hand over its memory: {error}"))
}

/// Memory of a device that is lent to find out which ranks can map it. Dropping it withdraws and frees it.
pub(crate) struct Sample {
    device: Arc<Device>,
    shared_page: Arc<SharedPage>,
    /// `None`: it belongs to the caller of [`Sample::keep`].
    at: Option<Address>,
    /// 0 where no other process can have it.
    pub(crate) token: u64,
}

impl Sample {
    /// Allocates `bytes`.
    pub(crate) fn new(
        device: &Arc<Device>,
        shared_page: &Arc<SharedPage>,
        bytes: usize,
    ) -> smddp_cuda::Result<Self> {
        let at = device.allocate(bytes)?;
        let mut sample =
            Self { device: device.clone(), shared_page: shared_page.clone(), at: Some(at), token: 0 };
        let region = device.region(at)?;
        if !matches!(region.kind, Kind::Private | Kind::Host) && device.export(&region).is_ok() {
            let lender = device.clone();
            sample.token = shared_page.export(Box::new(move || show(&lender, &[region])));
        }
        Ok(sample)
    }

    /// No rank asks for it any more.
    pub(crate) fn withdraw(&mut self) {
        self.shared_page.withdraw(std::mem::take(&mut self.token));
    }

    /// Its memory, which is the caller's from now on.
    pub(crate) fn keep(mut self) -> Option<Address> {
        self.at.take()
    }

    /// Whether `rank`'s can be had here.
    pub(crate) fn try_of(
        device: &Arc<Device>,
        shared_page: &SharedPage,
        rank: usize,
        token: u64,
    ) -> Result<(), String> {
        if token == 0 {
            return Err(format!("memory of rank {rank}'s device cannot be had by other processes"));
        }
        fetch(device, shared_page, rank, token).map(drop)
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        self.withdraw();
        if let Some(at) = self.at.take() {
            // SAFETY: allocated in `new` and owned by this value. Peers map it to see whether they can, and never access it.
            unsafe { self.device.free(at) };
        }
    }
}

/// For each region: kind, bytes, handle where it is one; descriptors beside it.
fn show(device: &Device, parts: &[Region]) -> io::Result<MemoryExport> {
    let mut lent = MemoryExport::default();
    for region in parts {
        let export = device.export(region).map_err(io::Error::other)?;
        let kind = if matches!(export, Export::Legacy(_)) { LEGACY } else { MAPPED };
        lent.bytes.push(kind);
        lent.bytes.extend((region.bytes as u64).to_le_bytes());
        match export {
            Export::Legacy(handle) => lent.bytes.extend(handle),
            Export::Descriptor(fd) => lent.fds.push(fd),
        }
    }
    Ok(lent)
}

fn open(device: &Arc<Device>, lent: &MemoryExport) -> Result<Mapping, String> {
    let mut mapping = Mapping { device: device.clone(), parts: Vec::new() };
    let (mut rest, mut fds) = (&lent.bytes[..], lent.fds.iter());
    let cut = || "an answer that is cut short".to_owned();
    while let Some((&kind, after)) = rest.split_first() {
        let (bytes, after) = after.split_first_chunk::<8>().ok_or_else(cut)?;
        let bytes = usize::try_from(u64::from_le_bytes(*bytes)).map_err(|_| cut())?;
        let import = match kind {
            LEGACY => {
                let (handle, after) = after.split_first_chunk::<64>().ok_or_else(cut)?;
                rest = after;
                Import::Legacy(handle)
            }
            MAPPED => {
                rest = after;
                Import::Descriptor(fds.next().ok_or_else(cut)?)
            }
            _ => return Err(format!("a kind of memory that is not known here ({kind})")),
        };
        mapping.parts.push(device.import(import, bytes).map_err(|error| error.to_string())?);
    }
    Ok(mapping)
}
