//! What the settings leave between nodes: found out by looking, for `smddp info` and for what a transport may use.

use smddp_transport::fabric::{
    self,
    provider_choice::{Provider, ProviderError},
};
use smddp_transport::interface;
use smddp_transport::joint::{InterNode, TransportOptions, may_have_efa};

use super::Config;

impl Config {
    /// What the transports may use.
    pub(crate) fn transport_options(&self) -> TransportOptions {
        TransportOptions {
            staging: self.staging,
            shm: self.shm,
            node: self.node.clone(),
            interface: self.interface.clone(),
            family: self.family,
            peer_timeout: self.peer_timeout,
            between: self.between,
            encrypts: self.encrypts,
            library: self.library.clone(),
            provider: self.provider.clone(),
            local: self.launch.local,
            require: self.require.clone(),
        }
    }

    /// What serves between nodes, in words; the error says why nothing does.
    pub fn between_nodes(&self) -> std::result::Result<String, String> {
        let (names, way) = match self.between {
            InterNode::Nothing => return Err("SMDDP_TRANSPORT=shm forbids it".to_owned()),
            InterNode::Fabric => self.fabric_description()?,
            InterNode::Auto if may_have_efa() => {
                self.fabric_description().or_else(|_| self.tcp_description())?
            }
            InterNode::Auto | InterNode::Tcp => self.tcp_description()?,
        };
        match &self.require {
            Some(required) if !names.contains(required) => {
                Err(format!("SMDDP_REQUIRE={required}, but there is {way}"))
            }
            _ => Ok(way),
        }
    }

    /// What `SMDDP_REQUIRE` may call it, and what it is.
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

    /// What libfabric offers here and why it is taken or not, in lines.
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
