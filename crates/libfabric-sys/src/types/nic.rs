//! Network devices.
//!
//! Source: `rdma/fabric.h`; manual page fi_nic(3).

use std::ffi::{c_char, c_void};

use super::fid;

/// Identity of a network device.
#[repr(C)]
pub struct fi_device_attr {
    /// Name, for example `rdmap0s6`.
    pub name: *mut c_char,
    /// Device number, as text.
    pub device_id: *mut c_char,
    /// Version of the device, as text.
    pub device_version: *mut c_char,
    /// Vendor number, as text.
    pub vendor_id: *mut c_char,
    /// Name of the kernel driver.
    pub driver: *mut c_char,
    /// Version of the firmware.
    pub firmware: *mut c_char,
}

/// PCI address of a device.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fi_pci_attr {
    /// PCI domain.
    pub domain_id: u16,
    /// Bus number.
    pub bus_id: u8,
    /// Device number on the bus.
    pub device_id: u8,
    /// Function number of the device.
    pub function_id: u8,
}

/// Bus of a device.
#[repr(C)]
pub struct fi_bus_attr {
    /// Type of the bus: `FI_BUS_PCI` or unknown.
    pub bus_type: u32,
    /// The only member of a union in C.
    pub pci: fi_pci_attr,
}

/// Link of a network device.
#[repr(C)]
pub struct fi_link_attr {
    /// Link address, as text.
    pub address: *mut c_char,
    /// Maximum transmission unit in bytes.
    pub mtu: usize,
    /// Bits per second; 0 if unknown.
    pub speed: usize,
    /// State of the link.
    pub state: u32,
    /// Type of the network, as text.
    pub network_type: *mut c_char,
}

/// Network device of an `fi_info` entry.
#[repr(C)]
pub struct fid_nic {
    /// Common part.
    pub fid: fid,
    /// Identity, or null.
    pub device_attr: *mut fi_device_attr,
    /// Bus, or null.
    pub bus_attr: *mut fi_bus_attr,
    /// Link, or null.
    pub link_attr: *mut fi_link_attr,
    /// Data of the provider.
    pub prov_attr: *mut c_void,
}
