"""Access to the cluster: TLS with certificates on both sides, and users with passwords."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import urllib3
from support.etcd_server import Server
from support.internals import streams_of
from support.places import HANG_S, start_thread, until

import fscoord
from fscoord import EtcdStore
from fscoord.errors import StoreClosedError, StoreUnavailableError
from fscoord.stores.etcd.client import parse_access
from fscoord.stores.etcd.requests import b64

pytestmark = pytest.mark.etcd


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """The certificates of an authority, of a server and of a client, and one of an unknown authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "cacert")
    trustme.CA().cert_pem.write_to_path(tmp_path / "stranger")
    for name, leaf in (("server", authority.issue_cert("127.0.0.1")), ("client", authority.issue_cert("client"))):
        leaf.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        leaf.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.cert")
    return {path.name: str(path) for path in tmp_path.iterdir()}


@pytest.fixture
def secure_server(files: dict[str, str]) -> Iterator[Server]:
    server = Server(
        f"--cert-file={files['server.cert']}",
        f"--key-file={files['server.key']}",
        f"--trusted-ca-file={files['cacert']}",
        "--client-cert-auth",
        scheme="https",
    )
    yield server
    server.stop()


def test_tls_with_certificates_on_both_sides(secure_server: Server, files: dict[str, str]) -> None:
    ours = {"cacert": files["cacert"], "cert": files["client.cert"], "key": files["client.key"]}
    query = "&".join(f"{name}={path.replace('/', '%2F')}" for name, path in ours.items())
    with fscoord.open_store(f"etcd://{secure_server.address}/p?timeout={HANG_S}&{query}") as store:
        store.set("k", "v")
        store.announce_rank(0)
        with store.clone() as other, start_thread(other.get, "later") as waiter:
            until(lambda: streams_of(other))
            store.set("later", "1")
        assert waiter.result == b"1"
        waiting = store.clone()
        thread = start_thread(waiting.get, "never")
        until(lambda: streams_of(waiting))
        waiting.close()
        with pytest.raises(StoreClosedError):
            thread.join()


def test_server_with_an_untrusted_certificate_is_refused_at_once(secure_server: Server, files: dict[str, str]) -> None:
    with (
        secure_server.open("p", timeout=300, cacert=files["stranger"]) as store,
        pytest.raises(StoreUnavailableError, match=rf"{secure_server.address}.*certificate"),
    ):
        store.get("k")


def test_client_without_a_certificate_is_refused(secure_server: Server, files: dict[str, str]) -> None:
    with (
        secure_server.open("p", timeout=300, cacert=files["cacert"]) as store,
        pytest.raises(StoreUnavailableError, match=secure_server.address),
    ):
        store.set("k", "v")


def post(server: Server, path: str, body: dict[str, Any], token: str | None = None) -> dict[str, Any]:
    headers = {"Authorization": token} if token else {}
    with urllib3.HTTPConnectionPool("127.0.0.1", server.port) as pool:
        reply = pool.request("POST", f"/v3/{path}", json=body, headers=headers, retries=False)
        assert reply.status == 200, reply.data
        return reply.json()


@pytest.fixture
def guarded(own_server: Server) -> Server:
    """A server where "me" with the password "secret" may use what is below "mine/"."""
    for user in ("root", "me"):
        post(own_server, "auth/user/add", {"name": user, "password": "secret"})
    post(own_server, "auth/role/add", {"name": "mine"})
    grant = {"permType": "READWRITE", "key": b64(b"mine/"), "range_end": b64(b"mine0")}
    post(own_server, "auth/role/grant", {"name": "mine", "perm": grant})
    post(own_server, "auth/user/grant", {"user": "me", "role": "mine"})
    post(own_server, "auth/user/grant", {"user": "root", "role": "root"})
    post(own_server, "auth/enable", {})
    return own_server


def test_user_that_logs_in_can_use_only_permitted_keys(guarded: Server) -> None:
    with guarded.open("mine", timeout=HANG_S, user="me", password="secret") as store:
        store.set("k", "v")
        store.announce_rank(0)
        with store.clone() as other, start_thread(other.get, "later") as waiter:
            until(lambda: streams_of(other))
            store.set("later", "1")
        assert waiter.result == b"1"
    address = f"etcd://{guarded.address}/yours?user=me&password=secret&timeout=300"
    for call in (lambda store: store.set("k", "v"), lambda store: store.get("k")):
        with (
            fscoord.open_store(address) as store,
            pytest.raises(StoreUnavailableError, match="permission denied") as caught,
        ):
            call(store)
        assert not caught.value.maybe_applied
        assert caught.value.errno == 13


@pytest.mark.parametrize("options", [{}, {"user": "me", "password": "wrong"}, {"user": "nobody", "password": "secret"}])
def test_user_without_valid_credentials_is_refused_at_once(guarded: Server, options: dict[str, str]) -> None:
    with guarded.open("mine", timeout=300, **options) as store:
        for call in (lambda: store.set("k", "v"), lambda: store.get("k"), lambda: store.members()):
            with pytest.raises(StoreUnavailableError, match=guarded.address) as caught:
                call()
            assert caught.value.errno == 13
            assert "secret" not in str(caught.value)


def test_login_is_repeated_after_the_server_restarts(guarded: Server) -> None:
    """The server keeps its tokens in memory: after a restart it knows none of them."""
    with guarded.open("mine", timeout=HANG_S, user="me", password="secret") as store:
        store.set("k", "v")
        with store.clone() as other, start_thread(other.get, "later") as waiter:
            until(lambda: streams_of(other))
            guarded.kill()
            guarded.start()
            store.set("later", "1")
        assert waiter.result == b"1"


@pytest.mark.parametrize(
    "address",
    ["", "host:0x1", "h:99999", "ftp://h", "h1,,h2", "http://h1,https://h2", "user@h", "h/path", "a b", "[::1", "::1"],
)
def test_invalid_etcd_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"etcd|TLS"):
        EtcdStore(address, "p")


@pytest.mark.parametrize(
    ("address", "endpoints"),
    [
        ("h", (("h", 2379),)),
        ("etcd://h1:1,h2", (("h1", 1), ("h2", 2379))),
        ("http://h1:1,http://h2:2/", (("h1", 1), ("h2", 2))),
        ("[::1]:7", (("::1", 7),)),
        ("etcd://[fe80::1],10.0.0.1:5", (("fe80::1", 2379), ("10.0.0.1", 5))),
    ],
)
def test_address_names_every_member(address: str, endpoints: tuple[tuple[str, int], ...]) -> None:
    access = parse_access(address, tls=False, cacert=None, cert=None, key=None)
    assert access.endpoints == endpoints
    assert not access.tls
    assert parse_access(str(access), tls=True, cacert=None, cert=None, key=None).endpoints == endpoints
