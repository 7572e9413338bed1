//! Device memory shared between ranks: exports of this rank, and mappings of peer memory.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use smddp_base::fork::PerProcess;
use smddp_cuda::{Address, Device, Export, Import, Imported, Kind, Region};
use smddp_process::MemoryExport;
use smddp_shm::SharedPage;

use super::site_handle::DeviceSiteHandle;
use crate::sync::lock;

/// A mapped export of a peer: regions that are adjacent there, each mapped at any address here.
pub(crate) struct Mapping {
    device: Arc<Device>,
    parts: Vec<Imported>,
}

impl Mapping {
    /// Returns (address, bytes) of the pieces of `bytes` bytes at `offset`, in order. Returns `None` if the range
    /// exceeds the mapping.
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

const LEGACY_HANDLE: u8 = 0;
const DESCRIPTOR: u8 = 1;
/// Maximum number of mappings that a site keeps open.
const MAX_MAPPINGS: usize = 1024;

/// Peer memory that one site has mapped.
struct Imports {
    /// The site, which reports completed operations. Without it, all operations are complete.
    handle: Weak<DeviceSiteHandle>,
    /// By (rank, token): the mapping and the last operation that used it.
    mappings: HashMap<(usize, u64), (Arc<Mapping>, u64)>,
}

impl Imports {
    /// Returns true if no stream uses a mapping that operation `used` used last.
    fn is_idle(&self, used: u64) -> bool {
        self.handle.upgrade().is_none_or(|handle| handle.is_done(used) && !handle.released())
    }

    /// Closes idle mappings for which `which` (rank, last operation) returns true.
    fn close_idle(&mut self, which: impl Fn(usize, u64) -> bool) {
        let keys: Vec<_> = self.mappings.iter().map(|(key, (_, used))| (*key, *used)).collect();
        for (key, used) in keys {
            if which(key.0, used) && self.is_idle(used) {
                self.mappings.remove(&key);
            }
        }
    }
}

/// Imports of all sites of this process.
static ALL_IMPORTS: PerProcess<Mutex<Vec<Weak<Mutex<Imports>>>>> = PerProcess::new();

/// Exports and imports of one site.
pub(crate) struct Regions {
    device: Arc<Device>,
    shared_page: Option<Arc<SharedPage>>,
    /// Tokens by (address, generation) of the regions.
    exports: HashMap<Vec<(Address, u64)>, u64>,
    imports: Arc<Mutex<Imports>>,
}

/// Maximum time to wait for operations that use a stale mapping.
const MAX_UNMAP_WAIT: Duration = Duration::from_secs(10);
/// Interval of the checks that the owner still answers during that time.
const REQUEST_INTERVAL: Duration = Duration::from_millis(100);

impl Regions {
    pub(crate) fn new(handle: &Arc<DeviceSiteHandle>, shared_page: Option<Arc<SharedPage>>) -> Self {
        let imports = Imports { handle: Arc::downgrade(handle), mappings: HashMap::new() };
        let imports = Arc::new(Mutex::new(imports));
        let mut all = lock(ALL_IMPORTS.get());
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(&imports));
        Self { device: handle.device.clone(), shared_page, exports: HashMap::new(), imports }
    }

    /// Returns the (token, offset) that identify the bytes for peers, or `None` for memory that cannot be exported.
    pub(crate) fn export(
        &mut self,
        address: Address,
        bytes: usize,
    ) -> smddp_cuda::Result<Option<(u64, u64)>> {
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
                    "the driver reports no size for the memory at {at:#x}"
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
        if let Some(&token) = self.exports.get(&key) {
            return Ok(Some((token, offset)));
        }
        // Exports of memory that was at these addresses before are withdrawn.
        self.exports.retain(|regions, token| {
            let is_replaced = regions
                .iter()
                .any(|(base, generation)| key.iter().any(|(now, other)| base == now && generation != other));
            if is_replaced {
                shared_page.withdraw(*token);
            }
            !is_replaced
        });
        // The attributes of a region do not suffice: the driver also refuses to export imported memory, for example.
        if parts.iter().any(|region| self.device.export(region).is_err()) {
            return Ok(None);
        }
        let device = self.device.clone();
        let token = shared_page.export(Box::new(move || describe_regions(&device, &parts)));
        self.exports.insert(key, token);
        Ok(Some((token, offset)))
    }

    /// Maps the export `token` of `rank` for operation `now`. The mapping stays open until the operation is over.
    pub(crate) fn import(&mut self, rank: usize, token: u64, now: u64) -> Result<Arc<Mapping>, String> {
        if let Some((mapping, used)) = lock(&self.imports).mappings.get_mut(&(rank, token)) {
            *used = now;
            return Ok(mapping.clone());
        }
        let shared_page = self.shared_page.as_ref().ok_or("this rank shares no memory with its peers")?;
        let request_export = || request_export(shared_page, rank, token);
        let mapping = match map_export(&self.device, &request_export()?) {
            // Memory that the rank has freed may still be mapped here, by any group. The driver rejects a new mapping
            // of the same addresses while the old one is open.
            Err(_) if self.unmap_stale(rank, now, || request_export().is_ok()) => {
                import_memory(&self.device, shared_page, rank, token)?
            }
            Err(error) => return Err(format!("memory of rank {rank}: {error}")),
            Ok(mapping) => mapping,
        };
        let mapping = Arc::new(mapping);
        let mut imports = lock(&self.imports);
        if imports.mappings.len() >= MAX_MAPPINGS {
            let oldest = imports.mappings.values().map(|(_, used)| *used).min().unwrap_or(now);
            imports.close_idle(|_, used| used <= oldest && used < now);
        }
        imports.mappings.insert((rank, token), (mapping.clone(), now));
        Ok(mapping)
    }

    /// Closes mappings of a rank's memory after the operations before `now`, and idle mappings of other groups.
    /// Returns false if the rank stops answering, in which case `is_alive` is false.
    fn unmap_stale(&self, rank: usize, now: u64, is_alive: impl Fn() -> bool) -> bool {
        let begun = Instant::now();
        let mut asked = begun;
        loop {
            let mut imports = lock(&self.imports);
            imports.close_idle(|owner, used| owner == rank && used < now);
            let left = imports.mappings.iter().any(|((owner, _), (_, used))| *owner == rank && *used < now);
            drop(imports);
            if !left || begun.elapsed() > MAX_UNMAP_WAIT {
                break;
            }
            if asked.elapsed() > REQUEST_INTERVAL {
                if !is_alive() {
                    return false;
                }
                asked = Instant::now();
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        let others: Vec<_> = lock(ALL_IMPORTS.get()).iter().filter_map(Weak::upgrade).collect();
        for other in others.into_iter().filter(|other| !Arc::ptr_eq(other, &self.imports)) {
            let mut other = lock(&other);
            if other.mappings.values().any(|(mapping, _)| mapping.device.shares_driver(&self.device)) {
                other.close_idle(|_, _| true);
            }
        }
        true
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        if let Some(shared_page) = &self.shared_page {
            self.exports.values().for_each(|&token| shared_page.withdraw(token));
        }
    }
}

/// Requests the export `token` of `rank`, and maps it.
fn import_memory(
    device: &Arc<Device>,
    shared_page: &SharedPage,
    rank: usize,
    token: u64,
) -> Result<Mapping, String> {
    let reply = request_export(shared_page, rank, token)?;
    map_export(device, &reply).map_err(|error| format!("memory of rank {rank}: {error}"))
}

fn request_export(shared_page: &SharedPage, rank: usize, token: u64) -> Result<MemoryExport, String> {
    shared_page.import(rank, token).map_err(|error| format!("rank {rank} did not export its memory: {error}"))
}

/// Device memory that is exported to find out which ranks can map it. Dropping it withdraws and frees it.
pub(crate) struct ProbeAllocation {
    device: Arc<Device>,
    shared_page: Arc<SharedPage>,
    /// `None`: the caller of [`ProbeAllocation::keep`] owns it.
    at: Option<Address>,
    /// 0 if the memory cannot be exported.
    pub(crate) token: u64,
}

impl ProbeAllocation {
    /// Allocates `bytes`.
    pub(crate) fn new(
        device: &Arc<Device>,
        shared_page: &Arc<SharedPage>,
        bytes: usize,
    ) -> smddp_cuda::Result<Self> {
        let at = device.allocate(bytes)?;
        let mut probe =
            Self { device: device.clone(), shared_page: shared_page.clone(), at: Some(at), token: 0 };
        let region = device.region(at)?;
        if !matches!(region.kind, Kind::Private | Kind::Host) && device.export(&region).is_ok() {
            let exporter = device.clone();
            probe.token = shared_page.export(Box::new(move || describe_regions(&exporter, &[region])));
        }
        Ok(probe)
    }

    /// Withdraws the export. No rank may request it afterwards.
    pub(crate) fn withdraw(&mut self) {
        self.shared_page.withdraw(std::mem::take(&mut self.token));
    }

    /// Transfers ownership of the memory to the caller.
    pub(crate) fn keep(mut self) -> Option<Address> {
        self.at.take()
    }

    /// Checks that this process can map the export of `rank`.
    pub(crate) fn check_import(
        device: &Arc<Device>,
        shared_page: &SharedPage,
        rank: usize,
        token: u64,
    ) -> Result<(), String> {
        if token == 0 {
            return Err(format!("memory of the device of rank {rank} cannot be exported to other processes"));
        }
        import_memory(device, shared_page, rank, token).map(drop)
    }
}

impl Drop for ProbeAllocation {
    fn drop(&mut self) {
        self.withdraw();
        if let Some(at) = self.at.take() {
            // SAFETY: allocated in `new` and owned by this value. Peers map it as a check, and never access it.
            unsafe { self.device.free(at) };
        }
    }
}

/// Serialises the regions: kind, bytes and legacy handle of each, with the file descriptors separate.
fn describe_regions(device: &Device, parts: &[Region]) -> io::Result<MemoryExport> {
    let mut reply = MemoryExport::default();
    for region in parts {
        let export = device.export(region).map_err(io::Error::other)?;
        let kind = if matches!(export, Export::Legacy(_)) { LEGACY_HANDLE } else { DESCRIPTOR };
        reply.bytes.push(kind);
        reply.bytes.extend((region.bytes as u64).to_le_bytes());
        match export {
            Export::Legacy(handle) => reply.bytes.extend(handle),
            Export::Descriptor(fd) => reply.fds.push(fd),
        }
    }
    Ok(reply)
}

fn map_export(device: &Arc<Device>, reply: &MemoryExport) -> Result<Mapping, String> {
    let mut mapping = Mapping { device: device.clone(), parts: Vec::new() };
    let (mut rest, mut fds) = (&reply.bytes[..], reply.fds.iter());
    let truncated = || "truncated export".to_owned();
    while let Some((&kind, after)) = rest.split_first() {
        let (bytes, after) = after.split_first_chunk::<8>().ok_or_else(truncated)?;
        let bytes = usize::try_from(u64::from_le_bytes(*bytes)).map_err(|_| truncated())?;
        let import = match kind {
            LEGACY_HANDLE => {
                let (handle, after) = after.split_first_chunk::<64>().ok_or_else(truncated)?;
                rest = after;
                Import::Legacy(handle)
            }
            DESCRIPTOR => {
                rest = after;
                Import::Descriptor(fds.next().ok_or_else(truncated)?)
            }
            _ => return Err(format!("unknown kind of exported memory: {kind}")),
        };
        mapping.parts.push(device.import(import, bytes).map_err(|error| error.to_string())?);
    }
    Ok(mapping)
}
