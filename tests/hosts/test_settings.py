"""Host facts, and invalid settings: every rank reports the setting and its values."""

from __future__ import annotations

import sys

import pytest

from hosts import netlab, wires


@pytest.fixture(autouse=True)
def own_settings(backend) -> None:
    if backend != "smddp":
        pytest.skip("the settings are smddp's own")


def call(*sets: str, hosts: int = 2, procs: int = 1, **env: str) -> netlab.Outcome:
    command = [*netlab.job("call"), *(word for text in sets for word in ("--set", text))]
    return netlab.run(command, hosts=hosts, procs=procs, env=env, seconds=40)


def all_raise(outcome: netlab.Outcome, *words: str) -> None:
    for said in outcome.said:
        line = next((line for line in said.splitlines() if line.startswith("error ")), "")
        missing = [word for word in words if word not in line]
        assert line and not missing, f"{missing} not in {line!r}\n{outcome}"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("SMDDP_SOCKET_IFNAME", "eth"),
        pytest.param("SMDDP_SOCKET_IFNAME", "=eth0", marks=pytest.mark.slow),
        pytest.param("SMDDP_SOCKET_IFNAME", "^lo,docker", marks=pytest.mark.slow),
        pytest.param("NCCL_SOCKET_IFNAME", "^=lo", marks=pytest.mark.slow),
        pytest.param("GLOO_SOCKET_IFNAME", "eth0", marks=pytest.mark.slow),
    ],
)
def test_the_interface_can_be_named_in_the_ways_of_nccl_and_gloo(setting, value) -> None:
    # netlab sets the interfaces of NCCL and gloo; only the tested setting is kept.
    names = dict.fromkeys(("SMDDP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), "")
    outcome = call(**{**names, setting: value})
    assert outcome.status == 0 and all("sum 1" in said for said in outcome.said), outcome
    assert "eth0" in outcome.said[0], outcome


@pytest.mark.slow
@pytest.mark.parametrize(("family", "address"), [("AF_INET", "10.77.0."), ("AF_INET6", "fe80::")])
def test_the_family_of_addresses_can_be_chosen(family, address) -> None:
    outcome = call(SMDDP_SOCKET_FAMILY=family)
    assert outcome.status == 0 and all("sum 1" in said for said in outcome.said), outcome
    assert address in outcome.said[0], outcome


def test_missing_interface_is_reported_with_the_existing_ones() -> None:
    all_raise(call(SMDDP_SOCKET_IFNAME="nosuch0"), "SMDDP_SOCKET_IFNAME", "nosuch0", "eth0", "10.77.0.")


@pytest.mark.slow
def test_loopback_is_refused_between_hosts() -> None:
    all_raise(call(SMDDP_SOCKET_IFNAME="lo"), "SMDDP_SOCKET_IFNAME", "lo", "loopback")


def test_traffic_between_hosts_is_encrypted_on_request() -> None:
    outcome = call(SMDDP_ENCRYPT="1")
    assert outcome.status == 0 and all("sum 1" in said for said in outcome.said), outcome
    assert "eth0" in outcome.said[0] and "encrypted" in outcome.said[0], outcome


@pytest.mark.slow
def test_fabric_without_encryption_is_rejected_on_request() -> None:
    all_raise(
        call(**wires.settings("fabric"), SMDDP_ENCRYPT="1"), "SMDDP_ENCRYPT=1", "libfabric", "SMDDP_TRANSPORT=tcp"
    )


@pytest.mark.parametrize(
    ("setting", "one", "other"),
    [
        ("SMDDP_ENCRYPT", "1", "0"),
        pytest.param("SMDDP_ALGO", "ring", "mesh", marks=pytest.mark.slow),
        pytest.param("SMDDP_STAGING_BYTES", "32M", "64M", marks=pytest.mark.slow),
        pytest.param("SMDDP_TRANSPORT", "tcp", "auto", marks=pytest.mark.slow),
    ],
)
def test_setting_that_differs_between_hosts_is_reported_with_both_values(setting, one, other) -> None:
    outcome = call(f"0:{setting}={one}", f"1:{setting}={other}")
    all_raise(outcome, setting, one, other)


def test_shared_memory_alone_is_refused_across_hosts() -> None:
    all_raise(call(SMDDP_TRANSPORT="shm"), "SMDDP_TRANSPORT", "shm", "h0", "h1")


@pytest.mark.slow
def test_one_ranks_bad_setting_ends_all_ranks() -> None:
    """The rank with the valid setting does not wait for its timeout."""
    outcome = call("1:SMDDP_SOCKET_IFNAME=nosuch0")
    all_raise(outcome, "SMDDP_SOCKET_IFNAME", "nosuch0")
    assert max(row["seconds_after_last_fault"] or 0 for row in outcome.ranks) < 15, outcome


FABRIC = wires.WIRES["fabric"]


@pytest.mark.parametrize("setting", ["SMDDP_TRANSPORT", "SMDDP_REQUIRE"])
def test_missing_efa_fails_on_all_ranks(setting) -> None:
    """The errors name the alternative. SMDDP_REQUIRE is deprecated."""
    all_raise(call(**{setting: "efa"}), "SMDDP_TRANSPORT", "libfabric", "SMDDP_TRANSPORT=tcp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "path"),
    [("tcp", "tcp "), ("fabric:tcp", "fabric tcp;ofi_rxm "), ("fabric:tcp;ofi_rxm", "fabric tcp;ofi_rxm ")],
)
def test_available_transport_is_used(transport, path) -> None:
    wires.settings("tcp" if transport == "tcp" else "fabric")
    outcome = call(SMDDP_TRANSPORT=transport)
    assert outcome.status == 0 and all("sum 1" in said for said in outcome.said), outcome
    assert path in outcome.said[0], outcome


@pytest.mark.slow
def test_missing_libfabric_fails_on_all_ranks() -> None:
    asked = {"SMDDP_TRANSPORT": "fabric", "SMDDP_LIBFABRIC": "/nonexistent/libfabric.so.1"}
    all_raise(call(**asked), "SMDDP_LIBFABRIC=/nonexistent/libfabric.so.1", "SMDDP_TRANSPORT=tcp", "cannot open")


def test_missing_provider_is_reported_with_the_existing_ones() -> None:
    wires.settings("fabric")
    outcome = call(SMDDP_TRANSPORT="fabric:nosuch")
    all_raise(outcome, "SMDDP_TRANSPORT: ", "no provider nosuch", "tcp;ofi_rxm", "libfabric ")


@pytest.mark.slow
def test_one_ranks_missing_library_ends_all_ranks() -> None:
    outcome = call("1:SMDDP_LIBFABRIC=/nonexistent/libfabric.so.1", **wires.settings("fabric"))
    all_raise(outcome, "rank 1 (host h1", "SMDDP_LIBFABRIC=/nonexistent/libfabric.so.1")


def between_nodes(outcome: netlab.Outcome, host: int) -> str:
    """Returns the output of `smddp info` on the hosts."""
    assert outcome.status == 0, outcome
    return next(line for line in outcome.said[host].splitlines() if line.split()[:2] == ["between", "nodes"])


def info(**env: str) -> netlab.Outcome:
    # Disables wrapping at the width of the caller's terminal.
    env = {"COLUMNS": "1000", **env}
    return netlab.run([sys.executable, "-m", "smddp.tools.cli", "info"], hosts=2, procs=1, env=env, seconds=40)


def test_info_shows_the_interface_between_hosts() -> None:
    outcome = info()
    for host in range(2):
        assert f"tcp eth0 10.77.0.{host + 1}" in between_nodes(outcome, host), outcome


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"SMDDP_TRANSPORT": "shm"}, ["nothing: SMDDP_TRANSPORT=shm forbids it"]),
        ({"SMDDP_TRANSPORT": "efa"}, ["nothing: ", "libfabric"]),
        (
            {"SMDDP_TRANSPORT": "fabric", "SMDDP_LIBFABRIC": "/nonexistent/libfabric.so.1"},
            ["nothing: SMDDP_LIBFABRIC=/nonexistent/libfabric.so.1: no libfabric found"],
        ),
        (FABRIC, ["fabric: tcp;ofi_rxm, selected by SMDDP_TRANSPORT", "eth0 (10.77.0."]),
    ],
    ids=["forbidden", "no-efa", "no-library", "fabric"],
)
def test_info_shows_the_transport_that_settings_permit(env, words) -> None:
    if env is FABRIC:
        wires.settings("fabric")
    outcome = info(**env)
    for host in range(2):
        line = between_nodes(outcome, host)
        assert all(word in line for word in words), line
