//! Tests of discovery, devices and options through the real loading code, over a library that imitates EFA's provider.

use std::sync::atomic::AtomicU8;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fake_libfabric::{PATH, SimulatedFabric, knob};
use libfabric_sys::Version;
use smddp_net::wire::Wire;

use super::super::endpoint::FabricEndpoint;
use super::super::provider_choice::{ProviderError, Settings, choose_provider};
use super::super::registration::RegisteredStaging;
use super::simulated::{choose, connect};
use super::tests::{frames_over, kill};
use super::*;
use crate::rail::Rail as _;

/// Returns a fabric of a libfabric of that version, with that number of devices.
fn efa(version: Version, devices: u64) -> SimulatedFabric {
    SimulatedFabric::new().with(knob::VERSION, version.packed().into()).with(knob::DEVICES, devices)
}

fn settings(provider: Option<&str>, local: Option<(usize, usize)>) -> Settings {
    Settings { library: Some(PATH.into()), provider: provider.map(str::to_owned), address: None, local }
}

const NEW: Version = Version::new(2, 1);

#[test]
fn efa_is_the_default_provider_with_rails_in_bus_order() {
    let _fabric = efa(NEW, 4);
    let (choice, lines) = choose_provider(&settings(None, None));
    let choice = choice.unwrap();
    assert_eq!((choice.provider.as_str(), choice.version), ("efa", NEW));
    let rails = choice.rails();
    let want = [16, 32, 48, 64].map(|bus| format!("rdmap{bus}s27 (0000:{bus:02x}:1b.0)"));
    assert_eq!(rails, want);
    assert!(lines[0].starts_with(&format!("libfabric 2.1 at {PATH}")), "{lines:?}");
    assert!(lines.iter().any(|l| l.contains("rail rdmap16s27 (0000:10:1b.0), 100 Gbit/s")), "{lines:?}");
    assert!(lines.last().unwrap().contains("efa, the default where it is present"), "{lines:?}");
}

#[test]
fn signal_handlers_and_floating_point_mode_are_restored_after_loading() {
    extern "C" fn handler(_: i32) {}
    let fabric = efa(NEW, 1);
    fabric.set(knob::CHANGES_PROCESS_STATE, 1);
    let handler = handler as *const () as libc::sighandler_t;
    // SAFETY: an empty handler, for a signal that nothing sends.
    unsafe { libc::signal(libc::SIGSTKFLT, handler) };
    choose(None, None);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::signal(libc::SIGSTKFLT, libc::SIG_DFL) }, handler);
    assert!(std::hint::black_box(f32::MIN_POSITIVE) / 2.0 > 0.0, "denormals are flushed");
}

#[test]
fn devices_are_divided_among_the_ranks_of_a_node() {
    let _fabric = efa(NEW, 4);
    let rails = |local| choose(None, Some(local)).rails();
    assert_eq!(rails((0, 8)), rails((1, 8)));
    assert_eq!(rails((7, 8)), ["rdmap64s27 (0000:40:1b.0)"]);
    assert_eq!(rails((1, 2)).len(), 2);
    assert_eq!(rails((0, 1)).len(), 4);
}

#[test]
fn efa_direct_is_selected_by_name() {
    let _fabric = efa(NEW, 1);
    let choice = choose(Some("efa-direct"), None);
    assert_eq!(choice.provider, "efa-direct");
    assert!(choice.devices().all(|d| d.fabric() == "efa-direct"));
}

#[test]
fn unusable_provider_errors_contain_expected_and_actual_values() {
    let fabric = efa(Version::new(1, 17), 4);
    let (result, lines) = choose_provider(&settings(None, None));
    let reason = result.err().unwrap();
    assert!(matches!(reason, ProviderError::TooOld { .. }), "{reason}");
    let text = reason.to_string();
    assert!(
        text.contains("libfabric 1.17") && text.contains("needs 1.18") && text.contains("SMDDP_LIBFABRIC")
    );
    assert!(lines.last().unwrap().contains("none: libfabric 1.17"), "{lines:?}");

    fabric.set(knob::VERSION, NEW.packed().into());
    let (result, _) = choose_provider(&settings(Some("verbs"), None));
    let text = result.err().unwrap().to_string();
    assert!(text.contains("no provider verbs") && text.contains("it has efa-direct, efa"), "{text}");

    fabric.set(knob::DEVICES, 0);
    let (result, _) = choose_provider(&settings(None, None));
    let text = result.err().unwrap().to_string();
    assert!(text.contains("no provider efa") && text.contains("it has none"), "{text}");
}

#[test]
fn endpoints_respect_provider_limits_and_close_all_objects() {
    let fabric = efa(NEW, 2);
    let get = |counter| fabric.get(counter);
    for (no_options, emulated) in [(0, 0), (0, 1), (1, 0)] {
        fabric.set(knob::NO_OPTIONS, no_options);
        fabric.set(knob::EMULATED_WRITE, emulated);
        fabric.set(knob::OPTIONS, 0);
        let (_, rails) = open(&choose(None, None)).unwrap();
        assert_eq!(rails.len(), 2);
        let limits = rails[0].limits().common(rails[1].limits());
        if no_options == 0 {
            // Version 2.x reports a limit per kind of operation as options; the endpoint's attributes have only the largest.
            assert_eq!((limits.message, limits.one_sided), (8912, 1 << 30));
            assert_eq!(limits.writes, emulated == 0);
            let asked = 1 << libfabric_sys::FI_OPT_SHARED_MEMORY_PERMITTED
                | 1 << libfabric_sys::FI_OPT_CUDA_API_PERMITTED;
            assert_eq!(get(knob::OPTIONS), asked);
        } else {
            assert_eq!((limits.message, limits.writes), (1 << 30, true));
            assert_eq!(get(knob::OPTIONS), 0);
        }
        assert_eq!(rails[0].address().len(), 32);
        assert_ne!(rails[0].address(), rails[1].address());
        assert_eq!(get(knob::OPEN), 2 * 5);
        drop(rails);
        assert_eq!((get(knob::OPEN), get(knob::VIOLATIONS)), (0, 0));
    }
}

#[test]
fn endpoint_inserts_peers_on_every_rail_and_posts_receive_buffers() {
    let fabric = efa(NEW, 4);
    let get = |counter| fabric.get(counter);
    let memory: Arc<Vec<AtomicU8>> = Arc::new((0..1 << 16).map(|_| AtomicU8::new(0)).collect());
    let endpoint = || {
        let (name, rails) = open(&choose(None, None)).unwrap();
        let staging = RegisteredStaging::new(memory[0].as_ptr(), memory.len(), memory.clone());
        Arc::new(Mutex::new(FabricEndpoint::new(name, rails, staging, 1, 1 << 20).unwrap()))
    };
    let endpoints = [endpoint(), endpoint()];
    assert_eq!(get(knob::REGIONS), 0, "unused memory is not pinned");
    let wires = connect(&endpoints);
    let name = &wires[0].capabilities().name;
    assert!(name.starts_with("fabric efa (libfabric 2.1) ") && name.ends_with(", 4 rails"), "{name}");
    assert_eq!(get(knob::INSERTED), 2 * 4);
    assert!(get(knob::POSTED) > 2 * 16, "{}", get(knob::POSTED));
    // The fake has no descriptor to sleep on.
    assert!(!wires[0].wait_sources(&mut Vec::new()));
    drop((wires, endpoints));
    assert_eq!((get(knob::OPEN), get(knob::VIOLATIONS)), (0, 0));
}

#[test]
fn frames_arrive_over_simulated_efa_for_each_transfer_mode() {
    let fabric = efa(NEW, 2);
    for (emulated, takes) in [(0, 0), (1, 0), (0, 1)] {
        fabric.set(knob::EMULATED_WRITE, emulated);
        fabric.set(knob::DATA_CONSUMES_BUFFER, takes);
        assert!(frames_over("efa", true));
        assert_eq!((fabric.get(knob::OPEN), fabric.get(knob::VIOLATIONS)), (0, 0));
    }
}

#[test]
fn killed_process_is_detected_by_its_peer_over_simulated_efa() {
    let fabric = efa(NEW, 2);
    assert_eq!(kill("efa", false, Duration::from_secs(30)), Some(true));
    assert_eq!(fabric.get(knob::VIOLATIONS), 0);
}
