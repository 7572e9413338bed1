//! Interfaces of this machine, read with `getifaddrs` and sysfs.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use super::{Address, Interface};

/// Returns all interfaces of this process's network namespace, sorted by index.
///
/// # Errors
/// `getifaddrs` fails.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let mut by_name: BTreeMap<String, Interface> = BTreeMap::new();
    for entry in entries()? {
        let interface = by_name.entry(entry.name.clone()).or_insert_with(|| interface_of(&entry));
        interface.addresses.extend(entry.address);
    }
    let mut interfaces: Vec<Interface> = by_name.into_values().collect();
    interfaces.sort_unstable_by_key(|i| i.index);
    Ok(interfaces)
}

/// Entry of the kernel's list, which has one entry for each address of an interface.
struct AddressEntry {
    name: String,
    index: u32,
    flags: u32,
    address: Option<Address>,
}

fn interface_of(entry: &AddressEntry) -> Interface {
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

/// Returns the link speed in Mbit/s that the driver reports. Virtual interfaces report none, or -1.
fn speed(name: &str, index: u32) -> Option<u32> {
    let number = |file: &str| -> Option<i64> {
        std::fs::read_to_string(Path::new("/sys/class/net").join(name).join(file)).ok()?.trim().parse().ok()
    };
    // A container may see the sysfs of another network namespace, with an interface of the same name.
    if number("ifindex")? != i64::from(index) {
        return None;
    }
    u32::try_from(number("speed")?).ok().filter(|&mbit| mbit > 0)
}

fn entries() -> io::Result<Vec<AddressEntry>> {
    let mut head: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: getifaddrs is thread-safe. It stores the head of a list, which this function owns and frees below.
    if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut out = Vec::new();
    let mut next = head;
    // SAFETY: `next` is null or a member of the list, which nothing changes or frees before the loop ends.
    while let Some(member) = unsafe { next.as_ref() } {
        next = member.ifa_next;
        // SAFETY: the name of each member is a NUL-terminated string that lives as long as the list.
        let name = unsafe { CStr::from_ptr(member.ifa_name) };
        // SAFETY: as above. For an unknown name the kernel returns 0.
        let index = unsafe { libc::if_nametoindex(member.ifa_name) };
        // SAFETY: the address is null, or a sockaddr of its family's length that lives as long as the list.
        let address = unsafe { address(member.ifa_addr) };
        let name = name.to_string_lossy().into_owned();
        out.push(AddressEntry { name, index, flags: member.ifa_flags, address });
    }
    // SAFETY: `head` is from getifaddrs and is freed once; no borrow of the list remains.
    unsafe { libc::freeifaddrs(head) };
    Ok(out)
}

/// Returns the IP address in `from`, or `None` for another family.
///
/// # Safety
/// `from` is null, or points to a sockaddr of its family's length.
unsafe fn address(from: *const libc::sockaddr) -> Option<Address> {
    // SAFETY: by the contract of this function, `from` is null or a sockaddr. Every family begins with these fields.
    let family = i32::from(unsafe { from.as_ref() }?.sa_family);
    match family {
        libc::AF_INET => {
            // SAFETY: the sockaddr of this family is a sockaddr_in; the read allows any alignment.
            let v4 = unsafe { from.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Address { ip: IpAddr::V4(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr))), scope: 0 })
        }
        libc::AF_INET6 => {
            // SAFETY: as above, for a sockaddr_in6.
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
        // In a new network namespace it exists, but is down and has no address.
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
