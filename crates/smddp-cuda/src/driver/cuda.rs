//! The driver, opened.

use std::path::Path;
use std::sync::Arc;

use super::load::Object;
use super::table::Table;
use super::types::*;
use crate::device::{Error, Result, Uuid};

/// An open and initialised driver. One per process is enough; it is never unloaded.
#[derive(Debug)]
pub struct Cuda {
    pub(super) table: Table,
    count: i32,
}

impl Cuda {
    /// Opens the driver: the named file and no other if there is one; else what the process has open already; else
    /// what the loader finds as [`SONAME`](super::SONAME). [`Error::Absent`] if there is none, if it lacks a function,
    /// or if it sees no device.
    pub fn open(library: Option<&Path>) -> Result<Arc<Self>> {
        let table = Object::open(library, Table::find).map_err(Error::Absent)?;
        let absent = |error: Error| Error::Absent(error.to_string());
        // SAFETY: flags are 0 by contract; may be called more than once, and torch does too.
        unsafe { table.required.init(0) }.map_err(absent)?;
        let mut count = 0;
        // SAFETY: fills the number; the driver is initialised.
        unsafe { table.required.device_get_count(&raw mut count) }.map_err(absent)?;
        if count == 0 {
            return Err(Error::Absent("the driver sees no device".to_owned()));
        }
        Ok(Arc::new(Self { table, count }))
    }

    /// The newest CUDA that the driver knows, as [`Self::version`]; looks for it as [`Self::open`] does, and does not
    /// initialise it, so that children forked afterwards can still use it.
    pub fn look(library: Option<&Path>) -> Result<(i32, i32)> {
        let table = Object::open(library, Table::find).map_err(Error::Absent)?;
        Ok((table.version / 1000, table.version % 1000 / 10))
    }

    /// Devices that this process sees.
    pub fn count(&self) -> i32 {
        self.count
    }

    /// The newest CUDA that the driver knows, (13, 0) for 13.0.
    pub fn version(&self) -> (i32, i32) {
        (self.table.version / 1000, self.table.version % 1000 / 10)
    }

    pub(super) fn handle(&self, ordinal: i32) -> Result<CUdevice> {
        let mut device = 0;
        // SAFETY: fills the handle.
        unsafe { self.table.required.device_get(&raw mut device, ordinal) }?;
        Ok(device)
    }

    pub(super) fn uuid(&self, device: CUdevice) -> Result<Uuid> {
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: fills 16 bytes.
        unsafe { self.table.required.device_get_uuid(&raw mut uuid, device) }?;
        Ok(uuid.bytes)
    }

    pub(super) fn name(&self, device: CUdevice) -> Result<String> {
        let mut name = [0u8; 128];
        // SAFETY: writes at most the given number of bytes, the terminating zero among them.
        unsafe { self.table.required.device_get_name(name.as_mut_ptr().cast(), name.len() as i32, device) }?;
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    /// A number that the driver knows of a device; 0 for one that it has not heard of.
    pub(super) fn attribute(&self, device: CUdevice, attribute: i32) -> i32 {
        let mut value = 0;
        // SAFETY: fills the number, or refuses an attribute newer than itself.
        let told = unsafe { self.table.required.device_get_attribute(&raw mut value, attribute, device) };
        told.map_or(0, |()| value)
    }

    /// Whether `device` can use memory of `peer`, another device that this process sees.
    pub(super) fn can_access(&self, device: CUdevice, peer: CUdevice) -> bool {
        let mut can = 0;
        // SAFETY: fills the number.
        let told = unsafe { self.table.required.device_can_access_peer(&raw mut can, device, peer) };
        told.is_ok() && can != 0
    }
}
