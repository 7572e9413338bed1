//! Transport options of the settings, and the transport that they select between nodes, for `smddp info`.

use smddp_fabric::provider_choice::{self, Provider, ProviderError};
use smddp_group::joint::{InterNode, TransportOptions, may_have_efa};
use smddp_net::interface;
use smddp_plan::names::did_you_mean;

use super::{Config, is_rank_node};

/// Name of EFA's libfabric provider, the default one.
pub(super) const EFA: &str = "efa";

/// Transport between nodes (`SMDDP_TRANSPORT`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransportChoice {
    /// Kind of transport.
    pub inter_node: InterNode,
    /// libfabric provider. `None`: efa.
    pub provider: Option<String>,
}

impl Default for TransportChoice {
    fn default() -> Self {
        Self { inter_node: InterNode::Auto, provider: None }
    }
}

/// Parses the name of a transport, for libfabric optionally with `:PROVIDER`.
pub(super) fn parse(text: &str) -> std::result::Result<TransportChoice, String> {
    const NAMES: [&str; 5] = ["auto", "efa", "tcp", "fabric", "shm"];
    let (name, provider) = match text.split_once(':') {
        Some((name, provider)) => (name.trim(), Some(provider.trim().to_owned())),
        None => (text, None),
    };
    let inter_node = match (name.to_ascii_lowercase().as_str(), provider.as_deref()) {
        (_, Some("")) => None,
        ("auto", _) => Some(InterNode::Auto),
        ("fabric", _) => Some(InterNode::Fabric),
        ("efa", None) => {
            return Ok(TransportChoice { inter_node: InterNode::Fabric, provider: Some(EFA.to_owned()) });
        }
        ("tcp", None) => Some(InterNode::Tcp),
        ("shm", None) => Some(InterNode::Nothing),
        _ => None,
    };
    let inter_node = inter_node.ok_or_else(|| {
        let hint = if NAMES.contains(&name) { String::new() } else { did_you_mean(name, NAMES) };
        format!("one of {}, fabric:PROVIDER, auto:PROVIDER{hint}", NAMES.join(", "))
    })?;
    Ok(TransportChoice { inter_node, provider })
}

/// Formats the choice. Equivalent choices have equal texts.
impl std::fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let provider = self.provider.as_deref().unwrap_or(EFA);
        match self.inter_node {
            InterNode::Auto if provider == EFA => f.write_str("auto"),
            InterNode::Auto => write!(f, "auto:{provider}"),
            InterNode::Fabric => write!(f, "fabric:{provider}"),
            InterNode::Tcp => f.write_str("tcp"),
            InterNode::Nothing => f.write_str("shm"),
        }
    }
}

impl Config {
    /// Returns the options of the transports.
    pub(crate) fn transport_options(&self) -> TransportOptions {
        TransportOptions {
            staging: self.staging,
            shm: !self.node.as_deref().is_some_and(is_rank_node),
            node: self.node.clone(),
            interface: self.interface.clone(),
            family: self.family,
            peer_timeout: self.peer_timeout,
            inter_node: self.transport.inter_node,
            encrypts: self.encrypts,
            checksums: self.audit.wire,
            library: self.library.clone(),
            provider: self.transport.provider.clone(),
            separate_endpoint: false,
            local: self.launch.local,
        }
    }

    /// Describes the transport between nodes. The error gives the reason if none is available.
    ///
    /// # Errors
    /// The reason, as text: `SMDDP_TRANSPORT=shm`, no usable network interface, or no suitable libfabric
    /// provider.
    pub fn between_nodes(&self) -> std::result::Result<String, String> {
        let checked = if self.audit.wire { ", with checksums" } else { "" };
        self.path_between_nodes().map(|path| format!("{path}{checked}"))
    }

    fn path_between_nodes(&self) -> std::result::Result<String, String> {
        match self.transport.inter_node {
            InterNode::Nothing => Err("SMDDP_TRANSPORT=shm forbids it".to_owned()),
            InterNode::Fabric => self.fabric_description(),
            InterNode::Auto if may_have_efa() => {
                self.fabric_description().or_else(|_| self.tcp_description())
            }
            InterNode::Auto | InterNode::Tcp => self.tcp_description(),
        }
    }

    fn tcp_description(&self) -> std::result::Result<String, String> {
        let choice = interface::choose(&self.interface, self.family).map_err(|error| error.to_string())?;
        let warning = if choice.loopback { "; other hosts cannot reach it" } else { "" };
        let sealed = if self.encrypts { ", encrypted" } else { "" };
        Ok(format!("tcp {choice}{sealed}{warning}"))
    }

    fn fabric_description(&self) -> std::result::Result<String, String> {
        self.fabric().map(|lines| lines.join("; "))
    }

    /// Describes the libfabric provider and the reason for its choice, in lines.
    ///
    /// # Errors
    /// The reason, as text: libfabric is not loadable, or has no suitable provider.
    pub fn fabric(&self) -> std::result::Result<Vec<String>, String> {
        let (choice, lines) = self.choose_fabric();
        choice.map(|_| lines).map_err(|error| error.to_string())
    }

    fn choose_fabric(&self) -> (std::result::Result<Provider, ProviderError>, Vec<String>) {
        provider_choice::choose_provider(&provider_choice::Settings {
            library: self.library.clone(),
            provider: self.transport.provider.clone(),
            address: None,
            local: self.launch.local,
        })
    }
}
