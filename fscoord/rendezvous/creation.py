"""Creates the handler of a rendezvous from parameters. Has the registry of handlers and parses endpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Protocol

from fscoord._runtime import network, system
from fscoord._runtime.logging import logger
from fscoord.errors import FscoordError, RendezvousConnectionError
from fscoord.rendezvous.backend import C10dRendezvousBackend
from fscoord.rendezvous.base import RendezvousHandler
from fscoord.rendezvous.events import NodeState, construct_and_record_rdzv_event
from fscoord.rendezvous.handler import DynamicRendezvousHandler
from fscoord.rendezvous.parameters import SETTINGS, RendezvousParameters, RendezvousSettings
from fscoord.store import Store
from fscoord.stores.url import convert, open_store, parse_url, quoted

_PREFIXES = {"etcd": "etcd://", "file": "file:", "hash": "mem:", "tcp": "tcp://"}
"""Maps each ``store_type`` to the prefix of its addresses."""

READ_TIMEOUT_S = 60

OPTIONS = frozenset({"store_type", "read_timeout", "is_host", *SETTINGS})
"""The options of `create_handler`."""

# An endpoint with a scheme is a URL. ``node1:29400`` and ``file:29400`` are a host and a port.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://|(file|mem):(?![0-9]+$)", re.IGNORECASE)


def check_options(names: Iterable[str]) -> None:
    """Raise `ValueError` if `names` contains a name that is not an option of `create_handler`.

    Raises:
        ValueError: an option is unknown. The message lists the known options.
    """
    unknown = sorted(set(names) - OPTIONS)
    if unknown:
        words = f"unknown rendezvous option {', '.join(map(repr, unknown))}"
        raise ValueError(f"{words}; known are {', '.join(sorted(OPTIONS))}")


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Store]:
    """Open the store of the rendezvous that `params` describe. Return the backend and the store.

    The option ``store_type`` determines the form of the endpoint: ``file`` (a path, or an empty text), ``tcp``
    (``host[:port]``), ``etcd`` (one or more ``host[:port]``, separated by commas, and optionally ``/prefix``) or
    ``hash`` (a name within this process). Without this option the endpoint determines the type:

    - An empty text is a temporary file. Other processes must get its path, ``store.path``, from this process.
    - A text that begins with ``file:`` or contains a slash is a file. ``scheme://...`` is a store of this scheme.
    - ``host[:port]`` is a TCP store on this host, never a file of this name.

    The option ``read_timeout`` is how many seconds operations of the store wait. The default is the ``timeout`` in the
    address, or else 60. The option ``is_host``, for ``tcp``, is whether this process hosts the store. An ``is_master``
    in the address ``tcp://host:port?...`` overrides ``is_host``. If neither is given, this process hosts the store if
    the endpoint names this host and no other process hosts the store. The caller closes the store. The run id of the
    rendezvous is a part of the key of its state. The run id does not select the run of the store.

    The function logs an event (``fscoord.rendezvous.events``) if this process hosts the store, if it creates a
    temporary file, and if it fails.

    Raises:
        ValueError: an option, the endpoint or the run id is invalid.
        RendezvousConnectionError: the store can't be opened; ``__cause__`` is the error of the store.
    """
    store = None
    try:
        store = _open(params, _address(params))
        return C10dRendezvousBackend(store, params.run_id), store
    except Exception as error:
        if store is not None:
            store.close()
        construct_and_record_rdzv_event(params.run_id, f"{type(error).__name__}: {error}", NodeState.FAILED)
        raise


def create_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Open the store that `params` describe, and return a handler. `shutdown` of the handler closes the store.

    `get_rendezvous_handler` calls this function for the backend ``c10d``. The options are those of `create_backend` and
    of `RendezvousSettings.from_parameters`. Other options have no effect; `check_options` refuses them.

    Raises:
        ValueError: an option, the endpoint or the run id is invalid.
        RendezvousConnectionError: the store can't be opened.
    """
    settings = RendezvousSettings.from_parameters(params)
    backend, store = create_backend(params)
    return DynamicRendezvousHandler(settings, backend, store, params.local_addr, owns_store=True)


def _address(params: RendezvousParameters) -> str:
    """Return the address of the store that `params` describe; ``""`` for a temporary file."""
    endpoint = str(system.os.fspath(params.endpoint or "")).strip()
    given = params.get("store_type")
    if given is None and _URL.match(endpoint):
        return endpoint
    usual = "tcp" if endpoint and "/" not in endpoint else "file"
    store_type = usual if given is None else str(given).strip().lower()
    prefix = _PREFIXES.get(store_type)
    if prefix is None:
        raise ValueError(f"unknown store_type {given!r}; known are {', '.join(_PREFIXES)}")
    if endpoint.lower().startswith(prefix) or (store_type == "file" and not endpoint):
        return endpoint
    if "://" in endpoint:
        raise ValueError(
            f"the endpoint {endpoint!r} is not an address for store_type={store_type}: it must begin with {prefix} or"
            " have no scheme"
        )
    if store_type == "tcp":
        host, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
    if store_type == "etcd":  # each run id has its own prefix by default
        run_id = quoted(quoted(params.run_id).replace("/", "%2F"))
        return f"{prefix}{endpoint}" if "/" in endpoint else f"{prefix}{endpoint}/fscoord/rendezvous/run-{run_id}"
    return f"{prefix}{quoted(endpoint)}"


def is_file_name(endpoint: str) -> bool:
    """Return whether `endpoint` looks like the name of a file in the working directory, such as ``job``.

    A text without a slash and a colon may be the name of a file or of a host. `create_backend` interprets the text as
    the name of a host, unless the option ``store_type`` is ``file``. ``fscoord run`` sets this option if the result of
    this function is true.
    """
    is_name = re.fullmatch("[^/:]+", endpoint) is not None
    return is_name and endpoint != "localhost" and not network.is_ip_address(endpoint)


def _open(params: RendezvousParameters, address: str) -> Store:
    timeout = params.get_as_int("read_timeout", READ_TIMEOUT_S)
    if timeout is None or timeout <= 0:
        raise ValueError(f"the rendezvous option read_timeout={timeout} is not a positive number of seconds")
    if not address:
        return _open_temporary(params, timeout)
    scheme, host, _, own = parse_url(address)
    options = {} if "timeout" in own and params.get("read_timeout") is None else {"timeout": timeout}
    return _open_tcp(params, address, host, own, options) if scheme == "tcp" else _connect(address, **options)


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
        raise RendezvousConnectionError(f"can't create a temporary file for the rendezvous: {error}") from error
    message = f"Process {system.os.getpid()} hosts the rendezvous in the temporary file {store.path}"
    construct_and_record_rdzv_event(params.run_id, message, NodeState.INIT)
    if params.min_nodes > 1:
        text = (
            "the rendezvous %r has no endpoint, so it uses the temporary file %s, which other nodes do not know;"
            " pass a path that all nodes can reach as the endpoint"
        )
        logger(__name__).warning(text, params.run_id, store.path)
    return store


def _open_tcp(
    params: RendezvousParameters, address: str, host: str, own: dict[str, str], options: dict[str, Any]
) -> Store:
    """Open the TCP store at `address`, whose options are `own`.

    By default, this process hosts the store if `host` is a name of this machine and no other process hosts the store.
    """
    told = convert(own, "tcp").get("is_master", params.get_as_bool("is_host"))
    name = parse_rendezvous_endpoint(host, DEFAULT_PORT)[0]
    is_host = matches_machine_hostname(name) if told is None else told
    if "multi_tenant" not in own:
        options["multi_tenant"] = True
    try:
        store = _connect(address, is_master=is_host, **options)
    except RendezvousConnectionError:
        if not is_host or told is not None:
            raise
        # Another process of this rendezvous on this host may host the store already.
        return _connect(address, is_master=False, **options)
    if is_host:
        message = f"Process {system.os.getpid()} hosts the TCP store for the C10d rendezvous backend."
        construct_and_record_rdzv_event(params.run_id, message, NodeState.INIT)
    return store


ENTRY_POINTS = "fscoord.rendezvous"
"""Other packages register backends as entry points of this group. Each entry is a `RendezvousHandlerCreator`."""


class RendezvousHandlerCreator(Protocol):
    """The type of a function that creates the handler of a backend."""

    def __call__(self, params: RendezvousParameters, /) -> RendezvousHandler:
        """Create the handler that `params` describe."""


class RendezvousHandlerRegistry:
    """Maps the name of each backend to the function that creates its handlers."""

    def __init__(self) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Register `creator` for the name `backend`. A second call with the same arguments does nothing.

        Raises:
            ValueError: the name is empty, or another creator is registered for `backend`.
        """
        if not backend:
            raise ValueError("the rendezvous backend needs a name")
        if self._creators.setdefault(backend, creator) != creator:  # `is` would fail: bound methods are made anew
            raise ValueError(
                f"the rendezvous backend {backend!r} is registered already, with another creator; use another name"
            )

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Create a handler for `params` with the creator that is registered for ``params.backend``.

        Raises:
            ValueError: no creator is registered for that backend.
            RuntimeError: the creator returned a handler of another backend.
        """
        creator = self._creators.get(params.backend)
        if creator is None:
            known = ", ".join(sorted(self._creators)) or "none"
            raise ValueError(f"unknown rendezvous backend {params.backend!r}; known are: {known}")
        handler = creator(params)
        if handler.get_backend() != params.backend:
            raise RuntimeError(
                f"the creator of the rendezvous backend {params.backend!r} returned a handler of the backend"
                f" {handler.get_backend()!r}"
            )
        return handler

    def load_entry_points(self) -> None:
        """Register the entry points of the group ``fscoord.rendezvous``.

        Log a warning for each entry point that can't be loaded.
        """
        from importlib.metadata import entry_points

        for entry in entry_points(group=ENTRY_POINTS):
            try:
                if entry.name not in self._creators:
                    self.register(entry.name, entry.load())
            except Exception as error:  # noqa: BLE001 - a broken package must not break the others
                logger(__name__).warning("the rendezvous backend %r does not load: %s", entry.name, error)


rendezvous_handler_registry: RendezvousHandlerRegistry = RendezvousHandlerRegistry()
"""The registry that `get_rendezvous_handler` uses."""


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create a handler for `params` with the creator that is registered for ``params.backend``.

    Raises:
        ValueError: no creator is registered for this backend. The other errors are those of the creator; for the
            backend ``c10d`` see `create_handler`.
    """
    rendezvous_handler_registry.load_entry_points()
    return rendezvous_handler_registry.create_handler(params)


DEFAULT_PORT = 29400
"""The default port of a TCP rendezvous, as in torch."""

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Parse ``host``, ``host:port``, ``[v6]``, ``[v6]:port`` or a bare IPv6 address, and return the host and the port.

    If the endpoint has no port, the port is `default_port`. An empty endpoint is ``localhost``. A text with two or more
    colons and no brackets is an IPv6 address without a port. (torch would parse the ``1`` of ``::1`` as a port.)

    Raises:
        ValueError: the port is not an integer from 0 to 65535, or the host is neither a name nor an address.
    """
    text = (endpoint or "").strip()
    if not text:
        return "localhost", default_port
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not network.is_ip_address(host) or (rest and rest[0] != ":"):
            raise ValueError(f"the rendezvous endpoint {text!r} is not of the form [IPv6 address]:port")
    elif text.count(":") > 1:
        host, rest = text, ""
        if not network.is_ip_address(host):
            raise ValueError(
                f"the rendezvous endpoint {text!r} is not an IPv6 address; with a port, write [address]:port"
            )
    else:
        host, colon, port = text.partition(":")
        rest = colon + port
        if not _HOST.fullmatch(host):
            raise ValueError(f"the host in the rendezvous endpoint {text!r} is neither a name nor an address")
    return host, _port(rest[1:], text) if rest else default_port


def matches_machine_hostname(host: str) -> bool:
    """Return whether the name or address `host` resolves to this machine.

    The result determines whether this process hosts a TCP store, unless the option ``is_host`` is given.
    """
    return network.is_this_host(host)


def _port(text: str, endpoint: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise ValueError(f"the port in the rendezvous endpoint {endpoint!r} is not an integer from 0 to 65535")
    return int(text)
