"""From parameters to an open store and the backend on it, `create_backend`, or to a handler, `create_handler`."""

from __future__ import annotations

import re
from typing import Any

from fscoord._runtime import system
from fscoord._runtime.logging import logger
from fscoord.errors import FscoordError, RendezvousConnectionError
from fscoord.rendezvous.backend import C10dRendezvousBackend
from fscoord.rendezvous.endpoint import DEFAULT_PORT, matches_machine_hostname, parse_rendezvous_endpoint
from fscoord.rendezvous.events import NodeState, construct_and_record_rdzv_event
from fscoord.rendezvous.handler import DynamicRendezvousHandler
from fscoord.rendezvous.parameters import RendezvousParameters
from fscoord.rendezvous.settings import RendezvousSettings
from fscoord.store import Store
from fscoord.stores.url import open_store

__all__ = ["STORE_TYPES", "create_backend", "create_handler"]

STORE_TYPES = ("etcd", "file", "hash", "tcp")
READ_TIMEOUT_S = 60

# What has a scheme is a URL; node1:29400 is a host and its port, which looks much like one.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://|(file|mem):(?![0-9]+$)", re.IGNORECASE)


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Store]:
    """Open the store that `params` name, and return the backend on it, and the store.

    The option ``store_type`` says what the endpoint is: ``file`` (a path, or nothing), ``tcp`` (``host[:port]``),
    ``etcd`` (``host[:port]``, several with commas between them, and ``/prefix`` for a place of one's own) or ``hash``
    (a name within this process). Without it the endpoint decides:

    - nothing: a temporary file, for this process and those that it tells of ``store.path``;
    - what begins with ``file:`` or holds a slash: a file; ``scheme://...``: a store of that scheme;
    - ``host[:port]``: a TCP store on that host; never a file of that name.

    Other options are ``read_timeout``, how many seconds operations of the store wait (60), and, for ``tcp``,
    ``is_host``: whether this process hosts the store (found out by the host's name). Whoever called this closes the
    store. The id of the rendezvous is a part of its key, and never the store's own run id.

    What happened is recorded as an event: who hosts, where the temporary file is, and every failure.

    Raises:
        ValueError: an option, the endpoint or the run id makes no sense.
        RendezvousConnectionError: the store can't be opened; ``__cause__`` is its own error.
    """
    store = None
    try:
        store = _open(params, _store_type(params), _read_timeout(params))
        return C10dRendezvousBackend(store, params.run_id), store
    except Exception as error:
        if store is not None:
            store.close()
        message = f"{type(error).__name__}: {error}"
        construct_and_record_rdzv_event(params.run_id, message, NodeState.FAILED)
        raise


def create_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Return a handler on the store that `params` name, which it opens, and closes at its `shutdown`.

    It is what `get_rendezvous_handler` makes for the backend ``c10d``. The options are those of `create_backend` and
    of `RendezvousSettings.from_parameters`.

    Raises:
        ValueError: an option, the endpoint or the run id makes no sense.
        RendezvousConnectionError: the store can't be opened.
    """
    settings = RendezvousSettings.from_parameters(params)
    backend, store = create_backend(params)
    return DynamicRendezvousHandler(settings, backend, store, params.local_addr, owns_store=True)


def _store_type(params: RendezvousParameters) -> str:
    given = params.get("store_type")
    if given is not None:
        store_type = str(given).strip().lower()
        if store_type not in STORE_TYPES:
            raise ValueError(f"unknown store_type {given!r}; there are {', '.join(STORE_TYPES)}")
        return store_type
    endpoint = _endpoint(params)
    if not endpoint:
        return "file"
    if _URL.match(endpoint):
        return "url"
    return "file" if "/" in endpoint else "tcp"


def _endpoint(params: RendezvousParameters) -> str:
    endpoint = params.endpoint
    return str(system.os.fspath(endpoint or "")).strip()


def _read_timeout(params: RendezvousParameters) -> int:
    timeout = params.get_as_int("read_timeout", READ_TIMEOUT_S)
    if timeout is None or timeout <= 0:
        raise ValueError(f"the rendezvous option read_timeout={timeout} is no positive number of seconds")
    return timeout


def _open(params: RendezvousParameters, store_type: str, timeout: int) -> Store:
    endpoint = _endpoint(params)
    if store_type == "tcp":
        return _open_tcp(params, timeout)
    if store_type == "file" and not endpoint:
        return _open_temporary(params, timeout)
    if store_type == "file" and not endpoint.lower().startswith("file:"):
        address = f"file://{_quoted(endpoint)}" if endpoint.startswith("/") else f"file:{_quoted(endpoint)}"
    elif store_type == "hash" and not endpoint.lower().startswith("mem:"):
        address = f"mem:{_quoted(endpoint)}"
    elif store_type == "etcd" and "://" not in endpoint:
        address = f"etcd://{endpoint}" if "/" in endpoint else f"etcd://{endpoint}/{_prefix_of(params.run_id)}"
    else:
        address = endpoint
    return _connect(address, timeout=timeout)


def _prefix_of(run_id: str) -> str:
    """Return where in etcd a rendezvous is for which nobody named a place: one for each run."""
    return f"fscoord/rendezvous/run-{_quoted(_quoted(run_id).replace('/', '%2F'))}"


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, errors="surrogateescape")


def _connect(address: str, **options: Any) -> Store:
    try:
        return open_store(address, **options)
    except (FscoordError, OSError) as error:
        raise RendezvousConnectionError(f"the store of the rendezvous can't be opened: {error}") from error


def _open_temporary(params: RendezvousParameters, timeout: int) -> Store:
    from fscoord.stores.file import FileStore

    try:
        store = FileStore(timeout=timeout)
    except (FscoordError, OSError) as error:
        raise RendezvousConnectionError(f"no temporary file for the rendezvous: {error}") from error
    message = f"Process {system.os.getpid()} hosts the rendezvous in the temporary file {store.path}"
    construct_and_record_rdzv_event(params.run_id, message, NodeState.INIT)
    if params.min_nodes > 1:
        logger(__name__).warning(
            "rendezvous %r has no endpoint, so that other nodes can find it only if they are told of %s;"
            " pass a path that all of them can reach",
            params.run_id,
            store.path,
        )
    return store


def _open_tcp(params: RendezvousParameters, timeout: int) -> Store:
    host, port = parse_rendezvous_endpoint(_endpoint(params), DEFAULT_PORT)
    told = params.get_as_bool("is_host")
    is_host = matches_machine_hostname(host) if told is None else told
    address = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        store = _connect(address, timeout=timeout, is_master=is_host, multi_tenant=True)
    except RendezvousConnectionError:
        if not is_host or told is not None:
            raise
        # Of several processes of this rendezvous on the host only one hosts the store.
        return _connect(address, timeout=timeout, is_master=False, multi_tenant=True)
    if is_host:
        message = f"Process {system.os.getpid()} hosts the TCP store for the C10d rendezvous backend."
        construct_and_record_rdzv_event(params.run_id, message, NodeState.INIT)
    return store
