//! Selection of the network interface and address that a process uses between nodes.
//!
//! The selection is a pure function of a filter and a list of interfaces, which [`machine::interfaces`] reads from the
//! kernel. Only the core reads the settings; it passes their values here.

#[allow(unsafe_code)]
pub mod machine;
mod pattern;

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};

use pattern::Pattern;

/// Settings that name interfaces. The first that is set applies.
pub const NAMES: [&str; 3] = ["SMDDP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"];

/// Name prefixes of interfaces that connect virtual machines and containers of this host, not hosts.
const INTERNAL_PREFIXES: [&str; 7] = ["docker", "br-", "virbr", "veth", "cni", "lxc", "podman"];

/// Network interface of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// Name, for example "eth0".
    pub name: String,
    /// Kernel's index of the interface.
    pub index: u32,
    /// Administratively up, and with a carrier.
    pub up: bool,
    /// Set for a loopback interface, which no other host can reach.
    pub loopback: bool,
    /// Speed of the link in Mbit/s, if the driver reports it.
    pub speed_mbit: Option<u32>,
    /// Addresses in the kernel's order. Link-local IPv6 addresses have their scope id.
    pub addresses: Vec<Address>,
}

/// IP address, with the scope id that a link-local IPv6 address needs (0 for other addresses).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// IP address.
    pub ip: IpAddr,
    /// Scope id of a link-local IPv6 address, which is the index of its interface; 0 for other addresses.
    pub scope: u32,
}

impl Address {
    /// Returns the socket address with that port.
    pub fn with_port(self, port: u16) -> SocketAddr {
        match self.ip {
            IpAddr::V4(ip) => (ip, port).into(),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, self.scope).into(),
        }
    }

    /// Returns a peer's socket address as this host has to use it. Scope ids number the interfaces of one host, so a
    /// link-local address gets the scope id of the interface selected here.
    pub fn reaches(self, peer: SocketAddr) -> SocketAddr {
        match peer {
            SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() => {
                SocketAddrV6::new(*v6.ip(), v6.port(), 0, self.scope).into()
            }
            other => other,
        }
    }

    /// Returns true if only hosts on the same link can reach the address.
    fn link_local(self) -> bool {
        match self.ip {
            IpAddr::V4(ip) => ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        }
    }

    /// Returns the rank of the address in the selection; lower is better. IPv4 is first, because most clusters are
    /// configured for it. Link-local addresses are last.
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

/// Address family to select (`SMDDP_SOCKET_FAMILY`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressFamily {
    /// IPv4 or IPv6.
    #[default]
    Any,
    /// IPv4 only.
    V4,
    /// IPv6 only.
    V6,
}

impl AddressFamily {
    /// Parses `AF_INET` or `AF_INET6`, NCCL's spelling.
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

/// Interfaces that the user named, and the name of the setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceFilter {
    /// Interfaces in the syntax of the setting; `None`: any interface.
    pub value: Option<String>,
    /// Name of the setting, one of [`NAMES`].
    pub from: &'static str,
}

impl InterfaceFilter {
    /// Returns the first of [`NAMES`] for which `lookup` has a value. An empty value counts as unset.
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

/// Selected interface, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectedInterface {
    /// Name, for example "eth0".
    pub name: String,
    /// Address to bind to.
    pub address: Address,
    /// Speed of the link in Mbit/s, if the driver reports it.
    pub(crate) speed_mbit: Option<u32>,
    /// Other hosts cannot reach this address, so a job that spans hosts cannot use it.
    pub loopback: bool,
    /// Reason for logs and errors: "NCCL_SOCKET_IFNAME=eth", "the fastest of eth0, eth1".
    pub(crate) reason: String,
}

impl fmt::Display for SelectedInterface {
    /// Formats the interface: "eth0 10.77.0.1, 10000 Mbit/s (the only one between hosts)".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.address)?;
        if let Some(speed) = self.speed_mbit {
            write!(f, ", {speed} Mbit/s")?;
        }
        write!(f, " ({})", self.reason)
    }
}

/// Reason for which no interface can be used. `available` lists the interfaces of this machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No interface has a name that the setting selects.
    #[error("{from}={value:?} matches no network interface of this host, which has {available}")]
    NoMatch {
        /// Name of the setting.
        from: &'static str,
        /// Value of the setting.
        value: String,
        /// Interfaces of this machine.
        available: String,
    },
    /// No interface that the setting selects is up and has an address of the family.
    #[error(
        "{from}={value:?} leaves no network interface that is up and has an {family}address; this host has {available}"
    )]
    Unusable {
        /// Name of the setting.
        from: &'static str,
        /// Value of the setting.
        value: String,
        /// Required address family.
        family: AddressFamily,
        /// Interfaces of this machine.
        available: String,
    },
    /// No interface is up and has an address of the family.
    #[error("no network interface of this host is up and has an {family}address; it has {available}")]
    Nothing {
        /// Required address family.
        family: AddressFamily,
        /// Interfaces of this machine.
        available: String,
    },
    /// The value of the setting is malformed.
    #[error("{from}={value:?} is not a list of interfaces: {reason}")]
    Syntax {
        /// Name of the setting.
        from: &'static str,
        /// Value of the setting.
        value: String,
        /// Description of the syntax error.
        reason: &'static str,
    },
    /// The kernel's list of interfaces cannot be read, for the given reason.
    #[error("cannot read this host's network interfaces: {0}")]
    Machine(String),
}

/// Selects the interface and address to use on this machine.
///
/// # Errors
/// See [`choose_from`]; [`Error::Machine`] if the kernel does not list the interfaces.
pub fn choose(filter: &InterfaceFilter, family: AddressFamily) -> Result<SelectedInterface, Error> {
    let interfaces = machine::interfaces().map_err(|e| Error::Machine(e.to_string()))?;
    choose_from(&interfaces, filter, family)
}

/// Selects the interface and address to use from `interfaces`.
///
/// # Errors
/// The filter is invalid, or no interface matches it and the family.
pub fn choose_from(
    interfaces: &[Interface],
    filter: &InterfaceFilter,
    family: AddressFamily,
) -> Result<SelectedInterface, Error> {
    let pattern =
        match &filter.value {
            Some(value) => Some(
                Pattern::parse(value, filter.from == "GLOO_SOCKET_IFNAME")
                    .map_err(|reason| Error::Syntax { from: filter.from, value: value.clone(), reason })?,
            ),
            None => None,
        };
    let named: Vec<&Interface> =
        interfaces.iter().filter(|i| pattern.as_ref().is_none_or(|p| p.matches(&i.name))).collect();
    let mut usable: Vec<Candidate<'_>> =
        named.iter().copied().filter_map(|i| Candidate::new(i, family)).collect();
    // A bridge that the pattern names explicitly is not ranked behind other interfaces.
    let chosen_by_name = pattern.as_ref().is_some_and(Pattern::is_include_list);
    usable.sort_by_key(|c| c.order(chosen_by_name));

    let Some(best) = usable.first() else {
        let available = listing(interfaces);
        return Err(match (&filter.value, named.is_empty()) {
            (Some(value), true) => Error::NoMatch { from: filter.from, value: value.clone(), available },
            (Some(value), false) => {
                Error::Unusable { from: filter.from, value: value.clone(), family, available }
            }
            (None, _) => Error::Nothing { family, available },
        });
    };
    Ok(SelectedInterface {
        name: best.interface.name.clone(),
        address: best.address,
        speed_mbit: best.interface.speed_mbit,
        loopback: best.interface.loopback,
        reason: reason(&usable, filter, chosen_by_name),
    })
}

/// Usable interface, with its best address.
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

    fn is_internal(&self) -> bool {
        INTERNAL_PREFIXES.iter().any(|prefix| self.interface.name.starts_with(prefix))
    }

    /// Sort key: interfaces between hosts first, then those with an address that is not link-local, then by speed, then
    /// by index.
    fn order(&self, named: bool) -> (bool, bool, bool, std::cmp::Reverse<u32>, u32) {
        let Interface { loopback, speed_mbit, index, .. } = *self.interface;
        let speed = std::cmp::Reverse(speed_mbit.unwrap_or(0));
        (loopback, !named && self.is_internal(), self.address.link_local(), speed, index)
    }
}

/// Describes why the first of `usable`, which is sorted, was selected.
fn reason(usable: &[Candidate<'_>], filter: &InterfaceFilter, chosen_by_name: bool) -> String {
    let requested = filter.value.as_ref().map(|value| format!("{}={value}", filter.from));
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
        let faster = equals[1].order(chosen_by_name).3 != first.3;
        let choice = if faster { "fastest" } else { "first of the fastest" };
        Some(format!("the {choice} of {}", names.join(", ")))
    } else if first.0 && !chosen_by_name {
        Some("the only usable interface".to_owned())
    } else if requested.is_none() {
        Some("the only one between hosts".to_owned())
    } else {
        None
    };
    [requested, reason].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// Formats interfaces: "lo (127.0.0.1, ::1), eth0 (10.0.0.5), ib0 (down)".
pub fn listing(interfaces: &[Interface]) -> String {
    if interfaces.is_empty() {
        return "none".to_owned();
    }
    let each = interfaces.iter().map(|i| {
        let mut facts: Vec<String> = i.addresses.iter().map(Address::to_string).collect();
        if !i.up {
            facts.insert(0, "down".to_owned());
        } else if facts.is_empty() {
            facts.push("no address".to_owned());
        }
        format!("{} ({})", i.name, facts.join(", "))
    });
    each.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
