//! Selection of the libfabric library, provider and devices, with the reason for each decision.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use libfabric_sys::{
    FI_CONTEXT, FI_CONTEXT2, FI_EP_RDM, FI_MR_ALLOCATED, FI_MR_ENDPOINT, FI_MR_LOCAL, FI_MR_PROV_KEY,
    FI_MR_VIRT_ADDR, FI_MSG, FI_RMA, FI_THREAD_DOMAIN, Info, InfoList, Library, Missing, Version,
};
use smddp_process::undisturbed;

/// Settings and topology that determine the selection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// `SMDDP_LIBFABRIC`: path of the library.
    pub library: Option<PathBuf>,
    /// Provider of `SMDDP_TRANSPORT`: "efa", "efa-direct", "tcp;ofi_rxm", "tcp", "net". `None`: efa.
    pub provider: Option<String>,
    /// Address of the interface that IP providers use.
    pub address: Option<IpAddr>,
    /// Local rank, and number of ranks on this node: the devices are divided among them.
    pub local: Option<(usize, usize)>,
}

/// Reason why no fabric is available.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProviderError {
    /// No loadable library; with the configured path, if any.
    #[error("{}{reason}", named("SMDDP_LIBFABRIC", library.as_deref()))]
    Missing {
        /// Configured path of the library, if any.
        library: Option<String>,
        /// Reason why the library cannot be loaded.
        reason: Missing,
    },
    /// The library is too old for the efa provider.
    #[error(
        "libfabric {found} at {path} is too old for efa, which needs {needed} or newer (SMDDP_LIBFABRIC names another)"
    )]
    TooOld {
        /// Version of the library.
        found: Version,
        /// Oldest version that the efa provider needs.
        needed: Version,
        /// Path of the library.
        path: String,
    },
    /// The library lacks the requested provider, or that provider lacks the required capabilities.
    #[error(
        "{}libfabric {version} at {path} has no provider {} for reliable datagrams with one-sided operations; it has \
         {found}{}",
        asked.as_ref().map_or("", |_| "SMDDP_TRANSPORT: "),
        asked.as_deref().unwrap_or(DEFAULT),
        if asked.is_none() { " (SMDDP_TRANSPORT=fabric:PROVIDER selects another)" } else { "" }
    )]
    NoProvider {
        /// Configured provider; `None`: the default.
        asked: Option<String>,
        /// Summary of the available providers.
        found: String,
        /// Version of the library.
        version: Version,
        /// Path of the library.
        path: String,
    },
    /// No device of the provider has the address of the selected interface.
    #[error("provider {provider} has no device with the address {address}; it has {found}")]
    NoInterface {
        /// Name of the provider.
        provider: String,
        /// Address of the selected interface.
        address: IpAddr,
        /// The provider's devices, separated by commas.
        found: String,
    },
}

/// Default provider.
const DEFAULT: &str = "efa";

/// Returns a prefix such as "SMDDP_LIBFABRIC=/a/file: " if the setting is set.
fn named(setting: &str, value: Option<&str>) -> String {
    value.map_or_else(String::new, |value| format!("{setting}={value}: "))
}

/// Selected provider and its devices.
pub struct Provider {
    pub(crate) provider: String,
    pub(crate) version: Version,
    list: InfoList,
    /// Indices into the list.
    chosen: Vec<usize>,
}

impl Provider {
    /// Devices, one rail each.
    pub fn devices(&self) -> impl Iterator<Item = Info<'_>> {
        self.chosen.iter().filter_map(|&at| self.list.iter().nth(at))
    }

    /// Names of the rails, for example "rdmap0s6 (0000:10:1b.0)" or "eth0".
    pub fn rails(&self) -> Vec<String> {
        self.devices().map(|info| device(&info)).collect()
    }
}

/// First libfabric version whose `efa` provider uses the device's one-sided operations as this wire requires.
const EFA_NEEDS: Version = Version::new(1, 18);

/// Selects a provider. The log lines list what was found and why it is used or not, for any result.
pub fn choose_provider(settings: &Settings) -> (Result<Provider, ProviderError>, Vec<String>) {
    let mut lines = Vec::new();
    let result = undisturbed("libfabric", || choose(settings, &mut lines));
    lines.push(match &result {
        Ok(choice) => {
            let reason = match &settings.provider {
                Some(_) => "selected by SMDDP_TRANSPORT",
                None => "the default where it is present",
            };
            format!("fabric: {}, {reason}; rails: {}", choice.provider, choice.rails().join(", "))
        }
        Err(reason) => format!("fabric: none: {reason}"),
    });
    (result, lines)
}

fn choose(settings: &Settings, lines: &mut Vec<String>) -> Result<Provider, ProviderError> {
    let library = Library::open(settings.library.as_deref()).map_err(|reason| {
        let library = settings.library.as_ref().map(|path| path.display().to_string());
        ProviderError::Missing { library, reason }
    })?;
    let path = library.path().display().to_string();
    lines.push(format!("libfabric {} at {path} ({})", library.version(), library.place()));
    let asked = settings.provider.as_deref().unwrap_or(DEFAULT);
    // Limited to the provider, because others may scan their devices for long. The full list is needed for the error only.
    let first = if asked.starts_with("efa") { "efa" } else { asked };
    let has = |list: &InfoList| matching(list, asked).next().is_some();
    // Some layered providers are not found by their own name.
    let list = list(&library, Some(first)).filter(has).or_else(|| self::list(&library, None).filter(has));
    let Some(list) = list else {
        let found = self::list(&library, None).map_or_else(String::new, |all| summary(&all));
        if !found.is_empty() {
            lines.push(format!("libfabric's providers: {found}"));
        }
        return Err(ProviderError::NoProvider {
            asked: settings.provider.clone(),
            found: if found.is_empty() { "none".to_owned() } else { found },
            version: library.version(),
            path,
        });
    };
    if first == "efa" && library.version() < EFA_NEEDS {
        return Err(ProviderError::TooOld { found: library.version(), needed: EFA_NEEDS, path });
    }
    let mut chosen: Vec<(usize, Info<'_>)> = matching(&list, asked).collect();
    if let Some(address) = settings.address.filter(|_| first != "efa") {
        let found = chosen.iter().map(|(_, info)| device(info)).collect::<Vec<_>>();
        chosen.retain(|(_, info)| source(info) == Some(address));
        if chosen.is_empty() {
            let provider = asked.to_owned();
            return Err(ProviderError::NoInterface { provider, address, found: unique(found).join(", ") });
        }
    } else if first != "efa" {
        // Loopback is used only without other devices.
        let outside = |info: &Info<'_>| source(info).is_some_and(|a| !a.is_loopback());
        if chosen.iter().any(|(_, info)| outside(info)) {
            chosen.retain(|(_, info)| outside(info));
        }
        chosen.truncate(1);
    }
    // One entry per device: the first is the library's preferred one.
    let mut seen = HashSet::new();
    chosen.retain(|(_, info)| seen.insert(info.domain().to_owned()));
    chosen.sort_unstable_by_key(|(at, info)| (info.pci(), *at));
    if let Some((local, ranks)) = settings.local.filter(|_| first == "efa") {
        let all = chosen.len();
        chosen = share(all, local, ranks).map(|i| chosen[i]).collect();
        lines.push(format!("local rank {local} of {ranks} has {} of {all} devices", chosen.len()));
    }
    for (_, info) in &chosen {
        lines.push(format!("rail {}", describe(info)));
    }
    let provider = chosen.first().map_or_else(String::new, |(_, info)| name(info));
    let chosen = chosen.into_iter().map(|(at, _)| at).collect();
    Ok(Provider { provider, version: library.version(), list, chosen })
}

/// Range of devices of one rank on a node: neighbouring ranks share a device, or have several devices each.
fn share(devices: usize, local: usize, ranks: usize) -> std::ops::Range<usize> {
    let (devices, ranks) = (devices.max(1), ranks.max(1));
    let local = local.min(ranks - 1);
    let first = local * devices / ranks;
    first..((local + 1) * devices / ranks).max(first + 1)
}

/// Lists usable endpoints, of one provider or of all.
fn list(library: &Library, provider: Option<&str>) -> Option<InfoList> {
    let mut hints = library.hints()?;
    if let Some(provider) = provider {
        hints.name_provider(provider);
    }
    let raw = hints.as_ptr();
    // SAFETY: hints of this library with all attributes allocated, owned by this function alone.
    unsafe {
        (*raw).caps = FI_MSG | FI_RMA;
        (*raw).mode = FI_CONTEXT | FI_CONTEXT2;
        (*(*raw).ep_attr).kind = FI_EP_RDM;
        let domain = &mut *(*raw).domain_attr;
        domain.mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
        domain.threading = FI_THREAD_DOMAIN;
    }
    library.info(library.interface(), Some(&hints)).ok()
}

/// Entries of the requested provider: "tcp" means "tcp;ofi_rxm" unless a provider "tcp" exists.
fn matching<'a>(list: &'a InfoList, asked: &'a str) -> impl Iterator<Item = (usize, Info<'a>)> {
    let usable = |info: &Info<'_>| {
        let raw = info.raw();
        !raw.ep_attr.is_null()
            && !raw.domain_attr.is_null()
            && !raw.fabric_attr.is_null()
            && !raw.tx_attr.is_null()
            && !raw.rx_attr.is_null()
    };
    let exact = list.iter().any(|info| name(&info) == asked);
    let layered =
        move |info: &Info<'_>| info.provider().split_once(';').is_some_and(|(base, _)| base == asked);
    list.iter()
        .enumerate()
        .filter(move |(_, info)| usable(info) && if exact { name(info) == asked } else { layered(info) })
}

/// Returns the provider's name; `efa` has two fabrics, and `efa-direct` is requested by its own name.
fn name(info: &Info<'_>) -> String {
    match (info.provider(), info.fabric()) {
        ("efa", "efa-direct") => "efa-direct".to_owned(),
        (provider, _) => provider.to_owned(),
    }
}

fn device(info: &Info<'_>) -> String {
    let name = info.device().unwrap_or_else(|| info.domain());
    match (info.pci(), source(info)) {
        (Some(pci), _) => format!("{name} ({pci})"),
        (None, Some(address)) => format!("{name} ({address})"),
        (None, None) => name.to_owned(),
    }
}

fn describe(info: &Info<'_>) -> String {
    let mut text = device(info);
    if let Some(speed) = info.speed() {
        let _ = write!(text, ", {} Gbit/s", speed / 1_000_000_000);
    }
    text
}

fn unique(mut names: Vec<String>) -> Vec<String> {
    let mut seen = HashSet::new();
    names.retain(|name| seen.insert(name.clone()));
    names
}

fn summary(list: &InfoList) -> String {
    unique(list.iter().map(|info| name(&info)).collect()).join(", ")
}

/// Returns the IP address of an endpoint, if it has one.
fn source(info: &Info<'_>) -> Option<IpAddr> {
    let bytes = info.source();
    let family = u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?);
    match i32::from(family) {
        libc::AF_INET => {
            let four: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
            Some(IpAddr::V4(Ipv4Addr::from(four)))
        }
        libc::AF_INET6 => {
            let sixteen: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
            Some(IpAddr::V6(Ipv6Addr::from(sixteen)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_divided_among_the_ranks_of_a_node() {
        // Eight ranks and four devices: two ranks share one.
        assert_eq!(
            (0..8).map(|l| share(4, l, 8)).collect::<Vec<_>>(),
            [0..1, 0..1, 1..2, 1..2, 2..3, 2..3, 3..4, 3..4]
        );
        // Thirty-two devices: four each.
        assert_eq!((share(32, 0, 8), share(32, 7, 8)), (0..4, 28..32));
        assert_eq!(share(32, 0, 1), 0..32);
        for (devices, ranks) in [(1, 8), (3, 2), (5, 4), (4, 3)] {
            let all: Vec<_> = (0..ranks).flat_map(|l| share(devices, l, ranks)).collect();
            assert!((0..devices).all(|d| all.contains(&d)), "{devices} devices, {ranks} ranks");
        }
    }

    #[test]
    fn missing_library_error_names_the_setting() {
        let settings = Settings { library: Some("/nowhere/libfabric.so".into()), ..Settings::default() };
        let (result, lines) = choose_provider(&settings);
        assert!(matches!(result, Err(ProviderError::Missing { .. })));
        assert!(lines[0].contains("SMDDP_LIBFABRIC=/nowhere/libfabric.so: no libfabric found"), "{lines:?}");
    }
}
