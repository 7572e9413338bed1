//! Which network interface, and which of its addresses, a process uses between nodes.
//!
//! The choice is a pure function of what was asked for and of a list of interfaces; [`machine::interfaces`] makes
//! that list. What was asked for comes as values: the settings are read by the core alone.

pub mod machine;
mod pattern;

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};

use pattern::Pattern;

/// The settings that name interfaces; the first that is set counts.
pub const NAMES: [&str; 3] = ["SMDDP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"];

/// Names of interfaces that join virtual machines and containers of this host, not hosts.
const INNER: [&str; 7] = ["docker", "br-", "virbr", "veth", "cni", "lxc", "podman"];

/// One interface of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    pub index: u32,
    /// Administratively up and with a carrier.
    pub up: bool,
    pub loopback: bool,
    /// Of the link, in Mbit/s, where the driver tells it.
    pub speed_mbit: Option<u32>,
    /// In the kernel's order; link-local IPv6 ones with their scope.
    pub addresses: Vec<Address>,
}

/// An IP address, with the scope id that a link-local IPv6 one needs (else 0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    pub ip: IpAddr,
    pub scope: u32,
}

impl Address {
    /// An endpoint at this address.
    pub fn with_port(self, port: u16) -> SocketAddr {
        match self.ip {
            IpAddr::V4(ip) => (ip, port).into(),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, self.scope).into(),
        }
    }

    /// A peer's endpoint as this address's host has to write it: scope ids count interfaces of one host, so a
    /// link-local endpoint gets the one of the interface that is used here.
    pub fn reaches(self, peer: SocketAddr) -> SocketAddr {
        match peer {
            SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() => {
                SocketAddrV6::new(*v6.ip(), v6.port(), 0, self.scope).into()
            }
            other => other,
        }
    }

    /// Reaches only what hangs on the same link.
    fn link_local(self) -> bool {
        match self.ip {
            IpAddr::V4(ip) => ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        }
    }

    /// Lower is better: IPv4 first, as most clusters are set up for it; what leaves the link before what does not.
    fn rank(self) -> u8 {
        match self.ip {
            _ if self.link_local() => 3,
            IpAddr::V4(_) => 0,
            IpAddr::V6(ip) if !unique_local(ip) => 1,
            IpAddr::V6(_) => 2,
        }
    }
}

const fn unique_local(ip: Ipv6Addr) -> bool {
    ip.segments()[0] & 0xfe00 == 0xfc00
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.scope {
            0 => write!(f, "{}", self.ip),
            scope => write!(f, "{}%{scope}", self.ip),
        }
    }
}

/// Which kind of address; `SMDDP_SOCKET_FAMILY`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressFamily {
    #[default]
    Any,
    V4,
    V6,
}

impl AddressFamily {
    /// `AF_INET` or `AF_INET6`, as NCCL spells them.
    pub fn from_setting(value: &str) -> Option<Self> {
        match value.trim().to_ascii_uppercase().as_str() {
            "AF_INET" => Some(Self::V4),
            "AF_INET6" => Some(Self::V6),
            _ => None,
        }
    }

    fn accepts(self, ip: IpAddr) -> bool {
        match self {
            Self::Any => true,
            Self::V4 => ip.is_ipv4(),
            Self::V6 => ip.is_ipv6(),
        }
    }
}

impl fmt::Display for AddressFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Any => "",
            Self::V4 => "IPv4 ",
            Self::V6 => "IPv6 ",
        })
    }
}

/// Which interfaces the user named, and by which setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceFilter {
    pub value: Option<String>,
    pub from: &'static str,
}

impl InterfaceFilter {
    /// The first of [`NAMES`] that `lookup` has a value for; an empty value counts as none.
    pub fn first(lookup: impl Fn(&str) -> Option<String>) -> Self {
        NAMES
            .into_iter()
            .find_map(|from| {
                let value = lookup(from).filter(|v| !v.trim().is_empty())?;
                Some(Self { value: Some(value), from })
            })
            .unwrap_or(Self { value: None, from: NAMES[0] })
    }
}

/// The interface that is used, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectedInterface {
    pub name: String,
    pub address: Address,
    /// Of the link, in Mbit/s, where the driver tells it.
    pub speed_mbit: Option<u32>,
    /// Nobody else reaches this address: of no use to a job that spans hosts.
    pub loopback: bool,
    /// "NCCL_SOCKET_IFNAME=eth", "the fastest of eth0, eth1": for logs and errors.
    pub reason: String,
}

impl fmt::Display for SelectedInterface {
    /// "eth0 10.77.0.1, 10000 Mbit/s (the only one)".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.address)?;
        if let Some(speed) = self.speed_mbit {
            write!(f, ", {speed} Mbit/s")?;
        }
        write!(f, " ({})", self.reason)
    }
}

/// Why no interface can be used. `there` lists what this machine has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{from}={value:?} matches no network interface of this host, which has {there}")]
    NoMatch { from: &'static str, value: String, there: String },
    #[error(
        "{from}={value:?} leaves no network interface that is up and has an {family}address; this host has {there}"
    )]
    Unusable { from: &'static str, value: String, family: AddressFamily, there: String },
    #[error("no network interface of this host is up and has an {family}address; it has {there}")]
    Nothing { family: AddressFamily, there: String },
    #[error("{from}={value:?} is not a list of interfaces: {reason}")]
    Syntax { from: &'static str, value: String, reason: &'static str },
    #[error("cannot read this host's network interfaces: {0}")]
    Machine(String),
}

/// The interface and address to use on this machine.
pub fn choose(wanted: &InterfaceFilter, family: AddressFamily) -> Result<SelectedInterface, Error> {
    let interfaces = machine::interfaces().map_err(|e| Error::Machine(e.to_string()))?;
    choose_from(&interfaces, wanted, family)
}

/// The interface and address to use, of `interfaces`.
pub fn choose_from(
    interfaces: &[Interface],
    wanted: &InterfaceFilter,
    family: AddressFamily,
) -> Result<SelectedInterface, Error> {
    let pattern =
        match &wanted.value {
            Some(value) => Some(
                Pattern::parse(value, wanted.from == "GLOO_SOCKET_IFNAME")
                    .map_err(|reason| Error::Syntax { from: wanted.from, value: value.clone(), reason })?,
            ),
            None => None,
        };
    let named: Vec<&Interface> =
        interfaces.iter().filter(|i| pattern.as_ref().is_none_or(|p| p.matches(&i.name))).collect();
    let mut usable: Vec<Candidate<'_>> =
        named.iter().copied().filter_map(|i| Candidate::new(i, family)).collect();
    // The pattern decides, where it says which: a bridge that was asked for is as good as any other.
    let chosen_by_name = pattern.as_ref().is_some_and(Pattern::is_include_list);
    usable.sort_by_key(|c| c.order(chosen_by_name));

    let Some(best) = usable.first() else {
        let there = listing(interfaces);
        return Err(match (&wanted.value, named.is_empty()) {
            (Some(value), true) => Error::NoMatch { from: wanted.from, value: value.clone(), there },
            (Some(value), false) => {
                Error::Unusable { from: wanted.from, value: value.clone(), family, there }
            }
            (None, _) => Error::Nothing { family, there },
        });
    };
    Ok(SelectedInterface {
        name: best.interface.name.clone(),
        address: best.address,
        speed_mbit: best.interface.speed_mbit,
        loopback: best.interface.loopback,
        reason: reason(&usable, wanted, chosen_by_name),
    })
}

/// An interface that can be used, with the best of its addresses.
struct Candidate<'a> {
    interface: &'a Interface,
    address: Address,
}

impl<'a> Candidate<'a> {
    fn new(interface: &'a Interface, family: AddressFamily) -> Option<Self> {
        let addresses = interface.addresses.iter().copied().filter(|a| family.accepts(a.ip));
        let address = addresses.min_by_key(|a| a.rank())?;
        interface.up.then_some(Self { interface, address })
    }

    fn inner(&self) -> bool {
        INNER.iter().any(|prefix| self.interface.name.starts_with(prefix))
    }

    /// Between hosts first; then where more than the own link is reached; then by speed; then by index.
    fn order(&self, named: bool) -> (bool, bool, bool, std::cmp::Reverse<u32>, u32) {
        let Interface { loopback, speed_mbit, index, .. } = *self.interface;
        let speed = std::cmp::Reverse(speed_mbit.unwrap_or(0));
        (loopback, !named && self.inner(), self.address.link_local(), speed, index)
    }
}

/// In words why the first of `usable`, which is sorted, was taken.
fn reason(usable: &[Candidate<'_>], wanted: &InterfaceFilter, chosen_by_name: bool) -> String {
    let asked = wanted.value.as_ref().map(|value| format!("{}={value}", wanted.from));
    let first = usable[0].order(chosen_by_name);
    let equals: Vec<&Candidate<'_>> = usable
        .iter()
        .filter(|c| {
            let order = c.order(chosen_by_name);
            (order.0, order.1, order.2) == (first.0, first.1, first.2)
        })
        .collect();
    let reason = if equals.len() > 1 {
        let names: Vec<&str> = equals.iter().map(|c| c.interface.name.as_str()).collect();
        let quicker = equals[1].order(chosen_by_name).3 != first.3;
        let what = if quicker { "fastest" } else { "first of the fastest" };
        Some(format!("the {what} of {}", names.join(", ")))
    } else if first.0 && !chosen_by_name {
        Some("there is no other".to_owned())
    } else if asked.is_none() {
        Some("the only one between hosts".to_owned())
    } else {
        None
    };
    [asked, reason].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// "lo (127.0.0.1, ::1), eth0 (10.0.0.5), ib0 (down)".
pub fn listing(interfaces: &[Interface]) -> String {
    if interfaces.is_empty() {
        return "none".to_owned();
    }
    let each = interfaces.iter().map(|i| {
        let mut words: Vec<String> = i.addresses.iter().map(Address::to_string).collect();
        if !i.up {
            words.insert(0, "down".to_owned());
        } else if words.is_empty() {
            words.push("no address".to_owned());
        }
        format!("{} ({})", i.name, words.join(", "))
    });
    each.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
