use super::*;

const SMDDP: &str = NAMES[0];
const GLOO: &str = NAMES[2];

fn interface(index: u32, name: &str, speed: Option<u32>, addresses: &[&str]) -> Interface {
    let address = |text: &&str| {
        let (ip, scope) = text.split_once('%').unwrap_or((text, "0"));
        Address { ip: ip.parse().unwrap(), scope: scope.parse().unwrap() }
    };
    Interface {
        name: name.to_owned(),
        index,
        up: true,
        loopback: name == "lo",
        speed_mbit: speed,
        addresses: addresses.iter().map(address).collect(),
    }
}

/// Machine with one interface of each kind.
fn machine() -> Vec<Interface> {
    let mut down = interface(7, "eth3", Some(400_000), &["10.9.0.1"]);
    down.up = false;
    vec![
        interface(1, "lo", None, &["127.0.0.1", "::1"]),
        interface(2, "docker0", Some(100_000), &["172.17.0.1"]),
        interface(3, "eth0", Some(1_000), &["fe80::1%3", "2001:db8::1", "10.0.0.1"]),
        interface(4, "eth1", Some(25_000), &["10.1.0.1"]),
        interface(5, "eth2", Some(25_000), &["10.2.0.1"]),
        interface(6, "ib0", Some(100_000), &["fe80::6%6"]),
        down,
    ]
}

fn choose_with(
    interfaces: &[Interface],
    value: Option<&str>,
    family: AddressFamily,
) -> Result<SelectedInterface, Error> {
    choose_from(interfaces, &InterfaceFilter { value: value.map(str::to_owned), from: SMDDP }, family)
}

fn name(interfaces: &[Interface], value: Option<&str>) -> String {
    choose_with(interfaces, value, AddressFamily::Any).unwrap().name
}

#[test]
fn fastest_link_is_selected_then_lowest_index() {
    let choice = choose_with(&machine(), None, AddressFamily::Any).unwrap();
    assert_eq!((choice.name.as_str(), choice.speed_mbit, choice.loopback), ("eth1", Some(25_000), false));
    assert_eq!(choice.reason, "the first of the fastest of eth1, eth2, eth0");
    assert_eq!(choice.to_string(), format!("eth1 10.1.0.1, 25000 Mbit/s ({})", choice.reason));
}

#[test]
fn named_interface_overrides_speed() {
    assert_eq!(name(&machine(), Some("eth0")), "eth0");
    assert_eq!(name(&machine(), Some("=docker0")), "docker0");
    assert_eq!(name(&machine(), Some("^eth1,eth2")), "eth0");
    assert_eq!(
        choose_with(&machine(), Some("=eth2"), AddressFamily::Any).unwrap().reason,
        "SMDDP_SOCKET_IFNAME==eth2"
    );
}

#[test]
fn host_internal_bridges_rank_after_links_between_hosts() {
    let only = [machine().remove(0), machine().remove(1)];
    assert_eq!(name(&only, None), "docker0");
    assert_eq!(name(&[only[1].clone(), machine().remove(2)], None), "eth0");
}

#[test]
fn link_local_interface_ranks_after_others() {
    assert_eq!(name(&machine(), Some("eth0,ib0")), "eth0");
    let choice = choose_with(&machine(), Some("ib0"), AddressFamily::Any).unwrap();
    assert_eq!(choice.address.with_port(7).to_string(), "[fe80::6%6]:7");
}

#[test]
fn link_local_peer_address_gets_this_hosts_scope_id() {
    let mine = choose_with(&machine(), Some("ib0"), AddressFamily::Any).unwrap().address;
    let text = |peer: &str| mine.reaches(peer.parse().unwrap()).to_string();
    assert_eq!(text("[fe80::9%2]:7"), "[fe80::9%6]:7");
    assert_eq!(text("[2001:db8::9]:7"), "[2001:db8::9]:7");
    assert_eq!(text("10.0.0.9:7"), "10.0.0.9:7");
}

#[test]
fn loopback_is_selected_when_named_or_alone_and_always_flagged() {
    let named = choose_with(&machine(), Some("lo"), AddressFamily::Any).unwrap();
    assert_eq!((named.name.as_str(), named.loopback), ("lo", true));
    let alone = choose_with(&machine()[..1], None, AddressFamily::Any).unwrap();
    assert_eq!((alone.loopback, alone.reason.as_str()), (true, "the only usable interface"));
    let left = choose_with(&machine(), Some("^eth,ib,docker"), AddressFamily::Any).unwrap();
    assert!(left.loopback && left.reason.contains("the only usable interface"), "{left:?}");
}

#[test]
fn address_family_selects_the_address() {
    let ip = |family| choose_with(&machine(), Some("=eth0"), family).unwrap().address.ip.to_string();
    assert_eq!(ip(AddressFamily::Any), "10.0.0.1");
    assert_eq!(ip(AddressFamily::V4), "10.0.0.1");
    assert_eq!(ip(AddressFamily::V6), "2001:db8::1");
    // The faster interfaces have no IPv6 address.
    assert_eq!(choose_with(&machine(), None, AddressFamily::V6).unwrap().name, "eth0");
    assert_eq!(AddressFamily::from_setting("af_inet6"), Some(AddressFamily::V6));
    assert_eq!(AddressFamily::from_setting("inet"), None);
}

#[test]
fn unknown_name_error_has_the_setting_and_the_interfaces() {
    let text = choose_with(&machine(), Some("nosuch0"), AddressFamily::Any).unwrap_err().to_string();
    for part in [
        "SMDDP_SOCKET_IFNAME=\"nosuch0\"",
        "eth0 (fe80::1%3, 2001:db8::1, 10.0.0.1)",
        "eth3 (down, 10.9.0.1)",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn interface_that_is_down_or_lacks_the_family_is_reported() {
    for (value, family, reason) in
        [("=eth3", AddressFamily::Any, "up"), ("=eth1", AddressFamily::V6, "IPv6 address")]
    {
        let text = choose_with(&machine(), Some(value), family).unwrap_err().to_string();
        assert!(text.contains(value) && text.contains(reason), "{text}");
    }
    let text = choose_with(&[], None, AddressFamily::Any).unwrap_err().to_string();
    assert!(text.ends_with("it has none"), "{text}");
}

#[test]
fn first_setting_with_a_value_applies() {
    let lookup = |name: &str| match name {
        "SMDDP_SOCKET_IFNAME" => Some(" ".to_owned()),
        "GLOO_SOCKET_IFNAME" => Some("eth1".to_owned()),
        _ => None,
    };
    assert_eq!(
        InterfaceFilter::first(lookup),
        InterfaceFilter { value: Some("eth1".to_owned()), from: GLOO }
    );
    assert_eq!(InterfaceFilter::first(|_| None), InterfaceFilter { value: None, from: SMDDP });
}

#[test]
fn gloo_setting_accepts_nccl_syntax() {
    let filter = InterfaceFilter { value: Some("^lo,docker".to_owned()), from: GLOO };
    assert_eq!(choose_from(&machine(), &filter, AddressFamily::Any).unwrap().name, "eth1");
    let filter = InterfaceFilter { value: Some("eth".to_owned()), from: GLOO };
    let text = choose_from(&machine(), &filter, AddressFamily::Any).unwrap_err().to_string();
    assert!(text.contains("GLOO_SOCKET_IFNAME=\"eth\""), "{text}");
}

#[test]
fn this_machine_has_an_interface_or_lists_its_interfaces() {
    match choose(&InterfaceFilter { value: None, from: SMDDP }, AddressFamily::Any) {
        Ok(choice) => {
            // A socket can be bound to the selected address.
            std::net::TcpListener::bind(choice.address.with_port(0))
                .expect("the selected address belongs to this host");
        }
        Err(e) => assert!(e.to_string().contains("no network interface"), "{e}"),
    }
}
