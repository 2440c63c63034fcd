"""Parameters, the text form of options, endpoints, and which of them are this host."""

from __future__ import annotations

import socket

import pytest
from support.internals import network, system

from fscoord.rendezvous import (
    DEFAULT_PORT,
    RendezvousParameters,
    matches_machine_hostname,
    parse_rendezvous_config,
    parse_rendezvous_endpoint,
)


def parameters(**config):
    return RendezvousParameters("c10d", "/shared/job", "7", 1, 2, **config)


def test_parameters_keep_the_values_they_are_given():
    params = RendezvousParameters("c10d", "end", "id", 1, 2, "10.0.0.1", timeout=5)
    assert (params.backend, params.endpoint, params.run_id) == ("c10d", "end", "id")
    assert (params.min_nodes, params.max_nodes, params.local_addr) == (1, 2, "10.0.0.1")
    assert params.config == {"timeout": 5}
    assert "'10.0.0.1'" in repr(params)
    assert "'timeout': 5" in repr(params)


@pytest.mark.parametrize(
    ("backend", "least", "most"), [("", 1, 1), (None, 1, 1), ("c10d", 0, 1), ("c10d", -1, 1), ("c10d", 3, 2)]
)
def test_parameters_that_make_no_sense_are_refused(backend, least, most):
    with pytest.raises(ValueError):
        RendezvousParameters(backend, "end", "id", least, most)


def test_option_that_was_not_given_is_the_default():
    params = parameters(there="x")
    assert (params.get("there"), params.get("not"), params.get("not", 3)) == ("x", None, 3)
    assert params.get_as_bool("not") is None
    assert params.get_as_bool("not", True) is True
    assert params.get_as_int("not") is None
    assert params.get_as_int("not", 4) == 4


@pytest.mark.parametrize("value", [1, True, "1", "true", " TRUE ", "t", "T", "yes", "y", "on"])
def test_option_of_yes_is_read_as_yes(value):
    assert parameters(x=value).get_as_bool("x") is True


@pytest.mark.parametrize("value", [0, False, "0", "false", "F", "no", "N", "off"])
def test_option_of_no_is_read_as_no(value):
    assert parameters(x=value).get_as_bool("x", True) is False


@pytest.mark.parametrize("value", ["", "2", 2, -1, "maybe", 1.0, [], "yes no"])
def test_option_that_is_neither_yes_nor_no_is_refused(value):
    with pytest.raises(ValueError, match="x="):
        parameters(x=value).get_as_bool("x")


@pytest.mark.parametrize(("value", "number"), [(3, 3), ("3", 3), (" -3 ", -3), (True, 1), (3.0, 3)])
def test_integers_are_read_as_integers(value, number):
    assert parameters(x=value).get_as_int("x") == number


@pytest.mark.parametrize("value", ["", "three", "1.5", 1.5, float("inf"), float("nan"), [], object()])
def test_option_that_is_no_integer_is_refused(value):
    with pytest.raises(ValueError, match="x="):
        parameters(x=value).get_as_int("x")


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("", {}),
        ("   ", {}),
        ("a=1", {"a": "1"}),
        (" a = 1 , b=x=y ", {"a": "1", "b": "x=y"}),
    ],
)
def test_options_are_read_from_text(text, config):
    assert parse_rendezvous_config(text) == config


@pytest.mark.parametrize("text", ["=1", "a", "a=", "a= ,b=1", ",", "a=1,", "a=1,,b=2", "a=1,a=2"])
def test_text_that_is_no_list_of_options_is_refused(text):
    with pytest.raises(ValueError):
        parse_rendezvous_config(text)


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        (None, "localhost", 123),
        ("", "localhost", 123),
        ("  ", "localhost", 123),
        ("node1", "node1", 123),
        ("node1:0", "node1", 0),
        ("node-1.example.org:65535", "node-1.example.org", 65535),
        ("under_score.:80", "under_score.", 80),
        (" 10.0.0.1:29400 ", "10.0.0.1", 29400),
        ("10.0.0.1", "10.0.0.1", 123),
        ("::1", "::1", 123),
        ("[::1]", "::1", 123),
        ("[::1]:90", "::1", 90),
        ("2001:db8::7:80", "2001:db8::7:80", 123),
        ("[2001:db8::7]:29400", "2001:db8::7", 29400),
    ],
)
def test_endpoint_is_a_host_and_a_port(endpoint, host, port):
    assert parse_rendezvous_endpoint(endpoint, 123) == (host, port)


@pytest.mark.parametrize(
    "endpoint",
    [
        *("node1:", "node1:x", "node1:-1", "node1:65536", "node1:1.5", "node1:٣", "node1: 5"),
        *("[::1]:", "[::1]:65536", "[::1]x", "[::1", "::1]", "[]", "[node1]:5", "[::1]5"),
        *(":29400", "-node", "a b", "node1/x", "a:b:c", "::1::2", "2001:db8::7:29400", "node1:1:2", "no\nde"),
    ],
)
def test_endpoint_that_is_malformed_is_refused_and_named(endpoint):
    with pytest.raises(ValueError, match="endpoint"):
        parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_is_the_own_host_without_asking_anybody(name, monkeypatch):
    monkeypatch.setattr(network.socket, "getaddrinfo", None)
    assert matches_machine_hostname(name)
    assert matches_machine_hostname(system.hostname().upper())


@pytest.fixture
def resolver(monkeypatch):
    """A resolver that knows two hosts; this one is `here`."""
    hosts = {
        "here": ("here.cluster", ["10.0.0.1", "fd00::1"]),
        "alias": ("other.name", ["10.0.0.1"]),
        "there": ("there.cluster", ["10.0.0.2"]),
    }

    def getaddrinfo(name, *_args, **_named):
        if name not in hosts:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        canonical, addresses = hosts[name]
        return [(0, 0, 0, canonical if not n else "", (address, 0)) for n, address in enumerate(addresses)]

    monkeypatch.setattr(network.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(system, "hostname", lambda: "here")


@pytest.mark.parametrize("name", ["here", "here.cluster", "Here.Cluster", "10.0.0.1", "fd00::1", "fd00:0::1", "alias"])
def test_own_host_is_known_by_its_names_and_addresses(name, resolver):
    assert matches_machine_hostname(name)


@pytest.mark.parametrize("name", ["there", "there.cluster", "10.0.0.2", "fd00::2", "unknown", "x" * 300])
def test_hosts_elsewhere_are_distinguished_from_the_own_host(name, resolver):
    assert not matches_machine_hostname(name)


def test_free_port_can_be_listened_on():
    with socket.create_server(("127.0.0.1", network.free_port())) as server:
        assert server.getsockname()[1] > 0
