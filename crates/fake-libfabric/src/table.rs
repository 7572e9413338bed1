//! Registered memory and known peers of a device. The devices of other processes read this table with
//! `process_vm_readv`. So a device checks an access without the program of its peer, as real hardware does.

use std::mem::{offset_of, size_of};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};

use crate::knob::Rule;

#[repr(C)]
struct Region {
    /// 0 after deregistration.
    key: AtomicU64,
    at: AtomicU64,
    pub bytes: AtomicU64,
    /// Address of the first byte in operations of peers: `at`, or 0 without virtual addresses.
    base: AtomicU64,
}

const REGIONS: usize = 1024;
const KNOWN: usize = 4096;

/// The table of one domain. Its address is constant while the domain is open.
#[repr(C)]
pub struct Table {
    /// 0 after the domain is closed.
    token: AtomicU64,
    regions: AtomicU64,
    known: AtomicU64,
    region: [Region; REGIONS],
    /// The tokens of the devices in the address vector.
    peer: [AtomicU64; KNOWN],
}

/// The address of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Name {
    pub process: i32,
    pub token: u64,
    table: u64,
}

impl Name {
    pub const BYTES: usize = 32;

    pub fn bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0xfe; Self::BYTES];
        bytes[..4].copy_from_slice(&self.process.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.token.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.table.to_le_bytes());
        bytes
    }

    pub fn of(bytes: [u8; Self::BYTES]) -> Self {
        let word = |at: usize| std::array::from_fn(|i| bytes[at + i]);
        Self {
            process: i32::from_le_bytes(std::array::from_fn(|i| bytes[i])),
            token: u64::from_le_bytes(word(8)),
            table: u64::from_le_bytes(word(16)),
        }
    }
}

/// An address in the memory of a peer, with its key.
#[derive(Clone, Copy)]
pub struct Remote {
    pub at: u64,
    pub key: u64,
}

/// The reason for which a one-sided operation fails.
#[derive(Debug, PartialEq, Eq)]
pub enum AccessError {
    /// The peer's process has exited, or its device is closed.
    PeerClosed,
    /// The caller violates a rule.
    Violation(Rule, String),
}

#[repr(C)]
struct Range {
    at: *mut u8,
    bytes: usize,
}

unsafe extern "C" {
    fn process_vm_readv(pid: i32, to: *const Range, n: u64, from: *const Range, m: u64, flags: u64) -> isize;
    fn process_vm_writev(pid: i32, from: *const Range, n: u64, to: *const Range, m: u64, flags: u64)
    -> isize;
}

/// Copies bytes from or into a process. `own`: it is this process, whose memory must exist. Returns false if the memory
/// or the process does not exist.
pub fn copy((process, own): (i32, bool), here: *mut u8, there: u64, bytes: usize, write: bool) -> bool {
    let (here, there) = (Range { at: here, bytes }, Range { at: there as *mut u8, bytes });
    if own {
        let (from, to) = if write { (here, there) } else { (there, here) };
        // The ranges may overlap.
        unsafe { std::ptr::copy(from.at, to.at, bytes) };
        return true;
    }
    let copied = unsafe {
        match write {
            true => process_vm_writev(process, &raw const here, 1, &raw const there, 1, 0),
            false => process_vm_readv(process, &raw const here, 1, &raw const there, 1, 0),
        }
    };
    bytes == 0 || copied == bytes as isize
}

fn words((name, own): (Name, bool), from: usize, count: usize) -> Option<Vec<u64>> {
    let mut words = vec![0u64; count];
    let at = name.table + from as u64;
    copy((name.process, own), words.as_mut_ptr().cast(), at, 8 * count, false).then_some(words)
}

impl Table {
    pub fn new(token: u64) -> Box<Self> {
        // Zeros are valid for all fields. The table is too large for the stack.
        let mut table: Box<Self> = unsafe { Box::new_zeroed().assume_init() };
        *table.token.get_mut() = token;
        table
    }

    pub fn name(&self) -> Name {
        let (process, token) = (std::process::id() as i32, self.token.load(Relaxed));
        Name { process, token, table: std::ptr::from_ref(self) as u64 }
    }

    /// Registers memory, whose first byte peers find at the address `base`.
    pub fn register(&self, key: u64, at: u64, bytes: u64, base: u64) -> bool {
        let number = self.regions.load(Relaxed) as usize;
        let Some(region) = self.region.get(number) else { return false };
        region.at.store(at, Relaxed);
        region.bytes.store(bytes, Relaxed);
        region.base.store(base, Relaxed);
        region.key.store(key, Release);
        self.regions.store(number as u64 + 1, Release);
        true
    }

    pub fn deregister(&self, key: u64) {
        for region in &self.region[..self.regions.load(Relaxed) as usize] {
            if region.key.load(Relaxed) == key {
                region.key.store(0, Release);
            }
        }
    }

    pub fn add_peer(&self, peer: Name) -> bool {
        let number = self.known.load(Relaxed) as usize;
        let Some(place) = self.peer.get(number) else { return false };
        place.store(peer.token, Release);
        self.known.store(number as u64 + 1, Release);
        true
    }

    /// Checks an access of the device `me` to `bytes` bytes at `remote` of `peer`, whose device is open in this process if `own`
    /// is set. Returns their address in the peer's process.
    ///
    /// # Errors
    /// [`AccessError::PeerClosed`] if the peer's process has exited or its device is closed. [`AccessError::Violation`]
    /// with the rule if the peer does not know this device, or the key or the range of `bytes` bytes is not registered
    /// there.
    pub fn check_access(
        peer @ (name, _): (Name, bool),
        (me, checks_peers): (u64, bool),
        remote: Remote,
        bytes: u64,
    ) -> Result<u64, AccessError> {
        let head = words(peer, 0, 3).filter(|head| head[0] == name.token).ok_or(AccessError::PeerClosed)?;
        let (regions, known) = ((head[1] as usize).min(REGIONS), (head[2] as usize).min(KNOWN));
        if checks_peers {
            let known = words(peer, offset_of!(Self, peer), known).ok_or(AccessError::PeerClosed)?;
            if !known.contains(&me) {
                return Err(AccessError::Violation(
                    Rule::AddressVector,
                    "the target has not inserted the address of this device".to_owned(),
                ));
            }
        }
        let words = words(peer, offset_of!(Self, region), regions * size_of::<Region>() / 8);
        let words = words.ok_or(AccessError::PeerClosed)?;
        let Remote { at, key } = remote;
        let Some(&[_, start, size, base]) = words.as_chunks::<4>().0.iter().find(|region| region[0] == key)
        else {
            let text = format!("key {key:#x} is not registered at the target");
            return Err(AccessError::Violation(Rule::Key, text));
        };
        match at.checked_sub(base) {
            Some(offset) if bytes <= size && offset <= size - bytes => Ok(start + offset),
            _ => Err(AccessError::Violation(
                Rule::Address,
                format!("address {at:#x} is outside of the memory of key {key:#x}"),
            )),
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.token.store(0, Release);
    }
}
