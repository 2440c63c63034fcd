"""`create_backend`: the store of an endpoint, the recorded events, and the refused endpoints."""

from __future__ import annotations

import logging
import os

import pytest

from fscoord import FileStore, HashStore, RendezvousConnectionError, Store, errors
from fscoord.rendezvous import RdzvEvent, RendezvousParameters, create_backend
from fscoord.stores import tcp


def parameters(endpoint="", run_id="id", min_nodes=1, **config):
    return RendezvousParameters("c10d", endpoint, run_id, min_nodes, 4, **config)


@pytest.fixture
def create():
    """Give `create(...)`: `create_backend` of parameters with these arguments; the stores are closed at the end."""
    stores = []

    def call(*args, **named):
        backend, store = create_backend(parameters(*args, **named))
        stores.append(store)
        return backend, store

    yield call
    for store in stores:
        store.close()


@pytest.fixture
def events(caplog):
    """Give `events()`: the events recorded so far."""
    caplog.set_level(logging.INFO, "fscoord")
    return lambda: [
        RdzvEvent.deserialize(record.message) for record in caplog.records if record.name == "fscoord.rendezvous.events"
    ]


def test_path_is_a_file_store_shared_by_all_that_name_it(create, tmp_path, events):
    path = str(tmp_path / "job")
    (one, store), (two, _) = create(path), create(path)
    assert isinstance(store, FileStore)
    assert store.path == path
    token = one.set_state(b"state")[1]
    assert two.get_state() == (b"state", token)
    assert events() == []


@pytest.mark.parametrize("address", ["file:{}", "file://{}", "FILE:{}", "{}", " {} "])
def test_file_has_several_addresses(create, tmp_path, address):
    _, store = create(address.format(tmp_path / "job"))
    assert store.path == str(tmp_path / "job")


@pytest.mark.parametrize("name", ["job", "node1:29400", "per%20cent", "why?", "a#b", "a:b", "tcp:x"])
def test_store_type_file_takes_any_name_as_it_stands(create, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    create(name, store_type="file")
    assert name in os.listdir(tmp_path)
    create(str(tmp_path / "sub").replace("sub", "2" + name), store_type=" File ")
    assert "2" + name in os.listdir(tmp_path)


def test_path_object_is_a_file(create, tmp_path):
    _, store = create(tmp_path / "job")
    assert store.path == str(tmp_path / "job")


def test_endpoint_left_out_means_a_temporary_file_that_is_recorded(create, events):
    _, store = create()
    assert os.stat(store.path).st_mode & 0o777 == 0o600
    (event,) = events()
    assert store.path in event.message
    assert str(os.getpid()) in event.message
    assert (event.node_state.value, event.run_id) == ("INIT", "id")
    store.close()
    assert not os.path.exists(store.path)


def test_endpoint_left_out_for_several_nodes_gives_a_warning(create, caplog):
    _, store = create(min_nodes=2)
    assert [store.path in record.message for record in caplog.records if record.levelno == logging.WARNING] == [True]
    caplog.clear()
    create(min_nodes=1)
    assert not caplog.records


@pytest.mark.parametrize("options", [{"endpoint": "mem:{}"}, {"endpoint": "{}", "store_type": "hash"}])
def test_hash_store_is_shared_by_name_within_the_process(create, options, request):
    options = {**options, "endpoint": options["endpoint"].format(request.node.nodeid)}
    (one, store), (two, _) = create(**options), create(**options)
    assert isinstance(store, HashStore)
    one.set_state(b"state")
    assert two.get_state()[0] == b"state"


def test_read_timeout_is_that_of_every_store(create, tmp_path):
    for endpoint in ("", str(tmp_path / "job"), "mem:"):
        assert create(endpoint)[1].timeout.total_seconds() == 60
        assert create(endpoint, read_timeout="7")[1].timeout.total_seconds() == 7


@pytest.mark.parametrize("timeout", [0, -1, "0", "x", 1.5, ""])
def test_read_timeout_that_is_no_positive_integer_is_refused_and_recorded(create, events, timeout):
    with pytest.raises(ValueError, match="read_timeout"):
        create("mem:", read_timeout=timeout)
    (event,) = events()
    assert event.node_state.value == "FAILED"
    assert event.message.startswith("ValueError: ")


def test_store_type_that_is_unknown_is_refused_with_the_names_of_all(create, events):
    with pytest.raises(ValueError, match="etcd, file, hash, tcp"):
        create("x", store_type="zookeeper")
    assert events()[0].message.startswith("ValueError: unknown store_type 'zookeeper'")


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "mem://x"])
@pytest.mark.parametrize("store_type", ["etcd", "file", "tcp"])
def test_address_of_another_kind_than_the_store_type_is_refused(create, endpoint, store_type):
    with pytest.raises(ValueError, match=f"{endpoint}' is not an address for store_type={store_type}"):
        create(endpoint, store_type=store_type)


def test_rendezvous_without_a_name_is_refused_and_the_store_closed(tmp_path, events):
    with pytest.raises(ValueError, match="run id"):
        create_backend(parameters(str(tmp_path / "job"), run_id=""))
    assert events()[0].message.startswith("ValueError: ")


def test_file_that_cannot_be_opened_is_a_lost_connection_with_its_cause(create, tmp_path, events):
    with pytest.raises(RendezvousConnectionError, match="missing") as caught:
        create(str(tmp_path / "missing" / "job"))
    assert isinstance(caught.value.__cause__, errors.StoreError)
    assert events()[0].message == f"RendezvousConnectionError: {caught.value}"
    assert "Traceback" in events()[0].error_trace


@pytest.mark.parametrize("endpoint", ["unknown://x", "node1:x", "node1:65536", "a b"])
def test_endpoint_that_is_malformed_is_refused(create, endpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        create(endpoint)
    assert os.listdir(tmp_path) == []


class Network:
    """Stands for TCP stores: records which were opened, and whether as host."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, int, dict[str, object]]] = []
        self.fails_for_hosts = False
        self.fails = False

    def open(self, host: str, port: int, **options: object) -> Store:
        self.opened.append((host, port, options))
        if self.fails or (self.fails_for_hosts and options["is_master"]):
            raise errors.StoreUnavailableError("address in use")
        return HashStore()

    def hosting(self) -> list[object]:
        return [options["is_master"] for _, _, options in self.opened]


@pytest.fixture
def network(monkeypatch):
    network = Network()
    monkeypatch.setattr(tcp, "TCPStore", network.open)
    return network


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        *(("localhost", "localhost", 29400), ("localhost:5", "localhost", 5), ("mem:29400", "mem", 29400)),
        *(("::1", "::1", 29400), ("[::1]:7", "::1", 7), ("file:123", "file", 123)),
    ],
)
def test_endpoint_with_a_host_is_a_tcp_store_and_never_a_file(
    create, network, tmp_path, monkeypatch, endpoint, host, port
):
    monkeypatch.chdir(tmp_path)
    create(endpoint)
    assert [opened[:2] for opened in network.opened] == [(host, port)]
    assert network.opened[0][2]["timeout"] == 60
    assert os.listdir(tmp_path) == []


def test_host_of_the_tcp_store_records_that_it_hosts_it(create, network, events):
    create("127.0.0.1")
    (event,) = events()
    assert network.hosting() == [True]
    assert (event.node_state.value, str(os.getpid()) in event.message) == ("INIT", True)


def test_address_of_a_tcp_store_is_hosted_as_its_host_and_port_are(create, network, events):
    create("tcp://localhost:29492")
    create("tcp://localhost:29492?use_libuv=0&timeout=7")
    create("tcp://192.0.2.1:5")
    create("tcp://192.0.2.1:5", store_type="tcp", is_host=True)
    assert network.hosting() == [True, True, False, True]
    assert [options["timeout"] for _, _, options in network.opened] == [60, 7, 60, 60]
    assert network.opened[1][2]["use_libuv"] is False
    assert all(options["multi_tenant"] for _, _, options in network.opened)
    assert [event.node_state.value for event in events()] == ["INIT"] * 3


def test_address_that_says_which_process_is_the_master_is_obeyed(create, network):
    create("tcp://localhost:29492?is_master=0&multi_tenant=0")
    create("tcp://192.0.2.1:5?is_master=1")
    assert network.hosting() == [False, True]
    assert network.opened[0][2]["multi_tenant"] is False


def test_node_that_wrongly_took_itself_for_the_host_joins(create, network, events):
    network.fails_for_hosts = True
    create("127.0.0.1")
    assert network.hosting() == [True, False]
    assert events() == []


@pytest.mark.parametrize("is_host", [True, False])
def test_node_with_is_host_given_tries_nothing_else(create, network, is_host):
    network.fails = True
    with pytest.raises(RendezvousConnectionError):
        create("127.0.0.1", is_host=str(is_host))
    assert network.hosting() == [is_host]


def test_host_that_is_unreachable_is_a_lost_connection(create, network, events):
    network.fails = True
    with pytest.raises(RendezvousConnectionError, match="address in use"):
        create("192.0.2.1", is_host=False)
    assert events()[-1].message.startswith("RendezvousConnectionError: ")
