//! Transport options of the settings, and the transport that they select between nodes, for `smddp info`.

use smddp_transport::fabric::{
    self,
    provider_choice::{Provider, ProviderError},
};
use smddp_transport::interface;
use smddp_transport::joint::{InterNode, TransportOptions, may_have_efa};

use super::Config;

impl Config {
    /// Returns the options of the transports.
    pub(crate) fn transport_options(&self) -> TransportOptions {
        TransportOptions {
            staging: self.staging,
            shm: self.shm,
            node: self.node.clone(),
            interface: self.interface.clone(),
            family: self.family,
            peer_timeout: self.peer_timeout,
            inter_node: self.between,
            encrypts: self.encrypts,
            library: self.library.clone(),
            provider: self.provider.clone(),
            separate_endpoint: false,
            local: self.launch.local,
            require: self.require.clone(),
        }
    }

    /// Describes the transport between nodes. The error gives the reason if none is available.
    pub fn between_nodes(&self) -> std::result::Result<String, String> {
        let (names, description) = match self.between {
            InterNode::Nothing => return Err("SMDDP_TRANSPORT=shm forbids it".to_owned()),
            InterNode::Fabric => self.fabric_description()?,
            InterNode::Auto if may_have_efa() => {
                self.fabric_description().or_else(|_| self.tcp_description())?
            }
            InterNode::Auto | InterNode::Tcp => self.tcp_description()?,
        };
        match &self.require {
            Some(required) if !names.contains(required) => {
                Err(format!("SMDDP_REQUIRE={required}, but there is {description}"))
            }
            _ => Ok(description),
        }
    }

    /// Returns the names that `SMDDP_REQUIRE` accepts for TCP, and its description.
    fn tcp_description(&self) -> std::result::Result<(Vec<String>, String), String> {
        let choice = interface::choose(&self.interface, self.family).map_err(|error| error.to_string())?;
        let warning = if choice.loopback { "; other hosts cannot reach it" } else { "" };
        let sealed = if self.encrypts { ", encrypted" } else { "" };
        Ok((vec!["tcp".to_owned()], format!("tcp {choice}{sealed}{warning}")))
    }

    fn fabric_description(&self) -> std::result::Result<(Vec<String>, String), String> {
        let (choice, lines) = self.choose_fabric();
        let provider = choice.map_err(|error| error.to_string())?.provider;
        Ok((vec!["fabric".to_owned(), provider], lines.join("; ")))
    }

    /// Describes the libfabric provider and the reason for its choice, in lines.
    pub fn fabric(&self) -> std::result::Result<Vec<String>, String> {
        let (choice, lines) = self.choose_fabric();
        choice.map(|_| lines).map_err(|error| error.to_string())
    }

    fn choose_fabric(&self) -> (std::result::Result<Provider, ProviderError>, Vec<String>) {
        fabric::provider_choice::choose_provider(&fabric::provider_choice::Settings {
            library: self.library.clone(),
            provider: self.provider.clone(),
            address: None,
            local: self.launch.local,
        })
    }
}
