//! The opened driver.

use std::path::Path;
use std::sync::Arc;

use super::load::Object;
use super::table::Table;
use super::types::*;
use crate::device::{Error, Result, Uuid};

/// An open and initialised driver. One per process is sufficient; it is never unloaded.
#[derive(Debug)]
pub struct Cuda {
    pub(super) table: Table,
    count: i32,
}

impl Cuda {
    /// Opens and initialises the driver.
    ///
    /// Uses only the named file if there is one. Otherwise uses the library that the process has already loaded, or
    /// the library that the loader finds as [`SONAME`](super::SONAME).
    ///
    /// # Errors
    /// [`Error::Absent`] if the driver is missing, if it lacks a function, or if it has no visible device.
    pub fn open(library: Option<&Path>) -> Result<Arc<Self>> {
        let table = Object::open(library, Table::find).map_err(Error::Absent)?;
        let absent = |error: Error| Error::Absent(error.to_string());
        // SAFETY: flags must be 0; repeated calls are allowed, and torch calls it too.
        unsafe { table.required.init(0) }.map_err(absent)?;
        let mut count = 0;
        // SAFETY: the call writes the number; the driver is initialised.
        unsafe { table.required.device_get_count(&raw mut count) }.map_err(absent)?;
        if count == 0 {
            return Err(Error::Absent("no device is visible to the driver".to_owned()));
        }
        Ok(Arc::new(Self { table, count }))
    }

    /// Returns the newest supported CUDA version like [`Self::version`], and finds the driver like [`Self::open`].
    ///
    /// Does not initialise the driver, so children that are forked afterwards can still use it.
    ///
    /// # Errors
    /// [`Error::Absent`] if the driver is missing, or if it lacks a function.
    pub fn driver_version(library: Option<&Path>) -> Result<(i32, i32)> {
        let table = Object::open(library, Table::find).map_err(Error::Absent)?;
        Ok((table.version / 1000, table.version % 1000 / 10))
    }

    /// Number of devices visible to this process.
    pub fn count(&self) -> i32 {
        self.count
    }

    /// The newest CUDA version that the driver supports: (13, 0) for 13.0.
    pub fn version(&self) -> (i32, i32) {
        (self.table.version / 1000, self.table.version % 1000 / 10)
    }

    pub(super) fn handle(&self, ordinal: i32) -> Result<CUdevice> {
        let mut device = 0;
        // SAFETY: the call writes the handle.
        unsafe { self.table.required.device_get(&raw mut device, ordinal) }?;
        Ok(device)
    }

    pub(super) fn uuid(&self, device: CUdevice) -> Result<Uuid> {
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: the call writes 16 bytes.
        unsafe { self.table.required.device_get_uuid(&raw mut uuid, device) }?;
        Ok(uuid.bytes)
    }

    pub(super) fn name(&self, device: CUdevice) -> Result<String> {
        let mut name = [0u8; 128];
        // SAFETY: the call writes at most the given number of bytes, including the terminating zero.
        unsafe { self.table.required.device_get_name(name.as_mut_ptr().cast(), name.len() as i32, device) }?;
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    /// Returns a numeric attribute of a device; 0 if the driver does not support the attribute.
    pub(super) fn attribute(&self, device: CUdevice, attribute: i32) -> i32 {
        let mut value = 0;
        // SAFETY: the call writes the number, or rejects an attribute that is newer than the driver.
        let result = unsafe { self.table.required.device_get_attribute(&raw mut value, attribute, device) };
        result.map_or(0, |()| value)
    }

    /// Returns true if `device` can access the memory of `peer`, another device visible to this process.
    pub(super) fn can_access(&self, device: CUdevice, peer: CUdevice) -> bool {
        let mut can = 0;
        // SAFETY: the call writes the number.
        let result = unsafe { self.table.required.device_can_access_peer(&raw mut can, device, peer) };
        result.is_ok() && can != 0
    }
}
