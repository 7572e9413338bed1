//! The interfaces of this machine, as the kernel tells them.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use super::{Address, Interface};

/// All interfaces of this process's network namespace, by index. Errors are the kernel's.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let mut found: BTreeMap<String, Interface> = BTreeMap::new();
    for entry in entries()? {
        let interface = found.entry(entry.name.clone()).or_insert_with(|| described(&entry));
        interface.addresses.extend(entry.address);
    }
    let mut found: Vec<Interface> = found.into_values().collect();
    found.sort_by_key(|i| i.index);
    Ok(found)
}

/// One entry of the kernel's list: an interface comes once for each of its addresses.
struct AddressEntry {
    name: String,
    index: u32,
    flags: u32,
    address: Option<Address>,
}

fn described(entry: &AddressEntry) -> Interface {
    let has = |flag: libc::c_int| entry.flags & flag as u32 != 0;
    Interface {
        name: entry.name.clone(),
        index: entry.index,
        up: has(libc::IFF_UP) && has(libc::IFF_RUNNING),
        loopback: has(libc::IFF_LOOPBACK),
        speed_mbit: speed(&entry.name, entry.index),
        addresses: Vec::new(),
    }
}

/// What the driver says; virtual interfaces say nothing, or -1.
fn speed(name: &str, index: u32) -> Option<u32> {
    let number = |file: &str| -> Option<i64> {
        std::fs::read_to_string(Path::new("/sys/class/net").join(name).join(file)).ok()?.trim().parse().ok()
    };
    // A container may see another network namespace's sysfs, with an interface of the same name.
    if number("ifindex")? != i64::from(index) {
        return None;
    }
    u32::try_from(number("speed")?).ok().filter(|&mbit| mbit > 0)
}

fn entries() -> io::Result<Vec<AddressEntry>> {
    let mut head: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: getifaddrs stores a list's head, which this function owns and frees below; any thread may call it.
    if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut out = Vec::new();
    let mut next = head;
    // SAFETY: `next` is null or a member of the list, which nobody changes or frees before the loop is over.
    while let Some(member) = unsafe { next.as_ref() } {
        next = member.ifa_next;
        // SAFETY: each member's name is a string of its own, ended by a zero, that lives as long as the list.
        let name = unsafe { CStr::from_ptr(member.ifa_name) };
        // SAFETY: as above; the kernel knows the name or answers 0.
        let index = unsafe { libc::if_nametoindex(member.ifa_name) };
        // SAFETY: the address is null or a sockaddr of the length that its family has, and lives as the list does.
        let address = unsafe { address(member.ifa_addr) };
        let name = name.to_string_lossy().into_owned();
        out.push(AddressEntry { name, index, flags: member.ifa_flags, address });
    }
    // SAFETY: `head` came from getifaddrs, is freed once, and nothing borrowed from it is left.
    unsafe { libc::freeifaddrs(head) };
    Ok(out)
}

/// The IP address in `from`; `None` for other families.
///
/// # Safety
/// `from` is null, or points at a sockaddr that is as long as its family says.
unsafe fn address(from: *const libc::sockaddr) -> Option<Address> {
    // SAFETY: null, or a sockaddr by the caller's word; every family begins with that.
    let family = i32::from(unsafe { from.as_ref() }?.sa_family);
    match family {
        libc::AF_INET => {
            // SAFETY: this family's sockaddr is a sockaddr_in; read as bytes that may lie unaligned.
            let v4 = unsafe { from.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Address { ip: IpAddr::V4(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr))), scope: 0 })
        }
        libc::AF_INET6 => {
            // SAFETY: as above, a sockaddr_in6.
            let v6 = unsafe { from.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Address { ip: IpAddr::V6(Ipv6Addr::from(v6.sin6_addr.s6_addr)), scope: v6.sin6_scope_id })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_loopback_interface_with_an_address() {
        let found = interfaces().unwrap();
        let lo = found.iter().find(|i| i.loopback).expect("a loopback interface");
        // In a fresh network namespace it is there but down, without an address.
        assert!(!lo.up || lo.addresses.iter().any(|a| a.ip.is_loopback()), "{lo:?}");
        for interface in &found {
            assert!(interface.index > 0, "{interface:?}");
            for address in &interface.addresses {
                let needs_scope = matches!(address.ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
                assert_eq!(address.scope != 0, needs_scope, "{interface:?}");
            }
        }
    }
}
