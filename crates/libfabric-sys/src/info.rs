//! Owned lists of `fi_info`, as `fi_getinfo` returns them.

use std::ffi::{CStr, CString, c_char};
use std::ptr::NonNull;

use crate::load::{Library, Version};
use crate::types::fi_info;

/// A list of `fi_info`, freed by the library that allocated it.
pub struct InfoList {
    library: Library,
    head: NonNull<fi_info>,
}

// SAFETY: plain memory of the library without thread affinity; the value is its only owner.
unsafe impl Send for InfoList {}

impl Library {
    /// Returns empty hints: an `fi_info` with all attributes allocated and zero.
    pub fn hints(&self) -> Option<InfoList> {
        // SAFETY: duplicating a null pointer allocates an empty `fi_info`.
        let head = NonNull::new(unsafe { (self.dupinfo)(std::ptr::null()) })?;
        Some(InfoList { library: self.clone(), head })
    }

    /// Returns the entries that match the hints.
    ///
    /// # Errors
    /// libfabric's error number, positive. `FI_ENODATA`: no entry matches.
    pub fn info(&self, interface: Version, hints: Option<&InfoList>) -> Result<InfoList, i32> {
        let mut head = std::ptr::null_mut();
        // SAFETY: hints are null or a live list of this library; `InfoList` frees the result.
        let code = unsafe {
            (self.getinfo)(
                interface.packed(),
                std::ptr::null(),
                std::ptr::null(),
                0,
                hints.map_or(std::ptr::null(), |h| h.head.as_ptr().cast_const()),
                &raw mut head,
            )
        };
        match NonNull::new(head) {
            Some(head) if code == 0 => Ok(InfoList { library: self.clone(), head }),
            _ => Err(if code == 0 { crate::FI_ENODATA } else { -code }),
        }
    }
}

impl InfoList {
    /// Returns the address of the first entry.
    pub fn as_ptr(&self) -> *mut fi_info {
        self.head.as_ptr()
    }

    /// Returns the library that allocated the list.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// Returns the entries, in order.
    pub fn iter(&self) -> impl Iterator<Item = Info<'_>> {
        let mut next = self.head.as_ptr();
        std::iter::from_fn(move || {
            let info = NonNull::new(next)?;
            // SAFETY: a live entry of this list, borrowed with it.
            next = unsafe { (*next).next };
            Some(Info { list: self, info })
        })
    }

    /// Sets the provider's name in hints.
    pub fn name_provider(&mut self, name: &str) {
        let Ok(name) = CString::new(name) else { return };
        // SAFETY: the library allocated the attributes of its hints. The name comes from `malloc`, because the
        // library frees it.
        unsafe {
            let attr = self.head.as_ref().fabric_attr;
            if !attr.is_null() {
                libc::free((*attr).prov_name.cast());
                (*attr).prov_name = libc::strdup(name.as_ptr());
            }
        }
    }
}

impl Drop for InfoList {
    fn drop(&mut self) {
        // SAFETY: this library allocated the list, and it is freed once.
        unsafe { (self.library.freeinfo)(self.head.as_ptr()) };
    }
}

/// One entry of a list.
#[derive(Clone, Copy)]
pub struct Info<'a> {
    list: &'a InfoList,
    info: NonNull<fi_info>,
}

impl<'a> Info<'a> {
    /// Returns the C structure.
    pub fn raw(&self) -> &'a fi_info {
        // SAFETY: a live entry, borrowed with its list; it is not written meanwhile.
        unsafe { self.info.as_ref() }
    }

    /// Returns an independent copy.
    pub fn duplicate(&self) -> Option<InfoList> {
        let library = &self.list.library;
        // SAFETY: a live entry; the copy has no next entry.
        let head = NonNull::new(unsafe { (library.dupinfo)(self.info.as_ptr()) })?;
        Some(InfoList { library: library.clone(), head })
    }

    /// Returns the provider's name, for example "efa" or "tcp;ofi_rxm".
    pub fn provider(&self) -> &'a str {
        // SAFETY: attributes of a live entry, or null.
        unsafe { self.raw().fabric_attr.as_ref() }.map_or("", |a| text(a.prov_name))
    }

    /// Returns the fabric's name, for example "efa", "efa-direct" or "192.0.2.0/24".
    pub fn fabric(&self) -> &'a str {
        // SAFETY: as in `provider`.
        unsafe { self.raw().fabric_attr.as_ref() }.map_or("", |a| text(a.name))
    }

    /// Returns the domain's name, for example "rdmap0s6-rdm" or "eth0".
    pub fn domain(&self) -> &'a str {
        // SAFETY: as in `provider`.
        unsafe { self.raw().domain_attr.as_ref() }.map_or("", |a| text(a.name))
    }

    /// Returns the device's name, for example "rdmap0s6".
    pub fn device(&self) -> Option<&'a str> {
        // SAFETY: a live entry's attributes, or null.
        let device = unsafe { self.raw().nic.as_ref()?.device_attr.as_ref()? };
        Some(text(device.name)).filter(|n| !n.is_empty())
    }

    /// Returns the device's PCI address, for example "0000:10:1b.0".
    pub fn pci(&self) -> Option<String> {
        // SAFETY: a live entry's attributes, or null.
        let bus = unsafe { self.raw().nic.as_ref()?.bus_attr.as_ref()? };
        let pci = bus.pci;
        (bus.bus_type == crate::FI_BUS_PCI).then(|| {
            format!("{:04x}:{:02x}:{:02x}.{:x}", pci.domain_id, pci.bus_id, pci.device_id, pci.function_id)
        })
    }

    /// Returns the link speed in bits per second, if the provider reports it.
    pub fn speed(&self) -> Option<usize> {
        // SAFETY: a live entry's attributes, or null.
        let link = unsafe { self.raw().nic.as_ref()?.link_attr.as_ref()? };
        Some(link.speed).filter(|&s| s > 0)
    }

    /// Returns the source address as raw bytes in `addr_format`.
    pub fn source(&self) -> &'a [u8] {
        let raw = self.raw();
        if raw.src_addr.is_null() {
            return &[];
        }
        // SAFETY: the library allocated `src_addrlen` bytes at that address, which live as long as the list.
        unsafe { std::slice::from_raw_parts(raw.src_addr.cast::<u8>().cast_const(), raw.src_addrlen) }
    }
}

/// Returns a string of the library; empty for null or a string that is not UTF-8.
fn text<'a>(at: *const c_char) -> &'a str {
    if at.is_null() {
        return "";
    }
    // SAFETY: a null-terminated string in an `fi_info`, which outlives its borrowers (see `Info`).
    unsafe { CStr::from_ptr(at) }.to_str().unwrap_or_default()
}
