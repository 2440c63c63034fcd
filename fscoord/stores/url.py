"""Parses and builds the addresses of stores. `open_store` opens a store; `register_scheme` adds a kind of address."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fscoord._runtime import system
from fscoord.store import Store

ENTRY_POINTS = "fscoord.stores"
"""The group of entry points in which other packages declare their schemes; see `register_scheme`."""

ENVIRONMENT_VARIABLE = "FSCOORD_STORE"
"""The environment variable with the address that `open_store` uses by default."""

Opener = Callable[..., Store]
Converter = Callable[[str], Any]

# At least two letters, so that C:\jobs is a path.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_BAD_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")


class _Scheme(NamedTuple):
    opener: Opener
    options: Mapping[str, Converter]


_schemes: dict[str, _Scheme] = {}


def open_store(url: str | system.os.PathLike[str] | None = None, **options: Any) -> Store:
    """Open the store at `url`.

    The address has one of these forms:

    - ``file:///shared/job/store?timeout=10``: `FileStore` on this path. ``file:store`` is in the current directory.
    - ``/shared/job/store``, or a ``Path``: `FileStore` on this path. Here ``?`` and ``%`` have no special meaning.
    - ``mem:NAME``: the `HashStore` named NAME of this process.
    - ``mem:``: a new `HashStore`.
    - ``tcp://host:port``: `TCPStore` as a client. With ``?is_master=1``: as the server (extra ``torch``).
    - ``etcd://host:port,host:port/prefix``: `EtcdStore` (extra ``etcd``). The default port is 2379.

    In a URL, percent-encode characters with a special meaning in paths and options (``%3F`` is a question mark). Write
    ``./a:b`` for a path with a colon before its first slash. In text, a ``~`` at the beginning of a path stands for the
    home directory, as in a shell. Write ``./~`` for a directory named ``~``. A ``Path`` is not changed.

    Args:
        url: the address. None: the address in the environment variable ``FSCOORD_STORE``.
        options: arguments of the store's constructor. For ``file:`` ``timeout``, ``world_size``, ``rank``, ``label``,
            ``lock``, ``watch``, ``durable``, ``read_only``, ``mode``, ``coherence``, ``trust_locks``,
            ``compact_bytes``, ``run_id``, ``spill_bytes`` and ``trace``. For ``mem:`` ``timeout``. For ``tcp:``
            ``timeout``, ``world_size``, ``is_master``, ``wait_for_workers``, ``multi_tenant`` and ``use_libuv``. For
            ``etcd:`` ``timeout``, ``user``, ``password``, ``tls``, ``cacert``, ``cert``, ``key``, ``session_ttl`` and
            ``rank``. Options can also be given in the URL's query, as text: times in seconds, ``mode`` in octal,
            booleans as ``1`` and ``0``. An argument overrides the query, except ``timeout=None``. The query
            ``run_id=ID`` gives a plain id; ``run_id=JOB&restart=N`` gives a job and its restart count.

    Raises:
        ValueError: there is no address, its scheme is unknown, or an option is unknown or invalid. Other packages may
            add schemes; see `~fscoord.stores.url.register_scheme`.
        TypeError: the address is neither text nor an ``os.PathLike[str]``, or an option has a wrong type.
        FscoordError: the store can't be opened; see the class of the store.
        ImportError: the extra that the scheme needs is not installed.
    """
    address = system.os.environ.get(ENVIRONMENT_VARIABLE) if url is None else url
    if not address:
        raise ValueError(
            f"no store to open: pass a path or a URL such as file:///shared/job/store, or set {ENVIRONMENT_VARIABLE}"
        )
    scheme, host, path, query = parse_url(address)
    known = _scheme(scheme)
    unknown = sorted((query.keys() | options.keys()) - known.options.keys())
    if unknown:
        raise ValueError(
            f"unknown option {', '.join(map(repr, unknown))} for a {scheme}: store; known are"
            f" {', '.join(sorted(known.options)) or 'none'}"
        )
    converted = convert(query, scheme)
    given = {name: value for name, value in options.items() if name != "timeout" or value is not None}
    return known.opener(host, path, **{**converted, **given})


def register_scheme(scheme: str, opener: Opener, options: Mapping[str, Converter]) -> None:
    """Register a scheme, so that `open_store` opens addresses that begin with ``{scheme}:``.

    A package may instead declare an entry point in the group ``fscoord.stores``, with the name of the scheme. The entry
    point is a function without arguments that calls `register_scheme`. `open_store` calls the function when an address
    has an unknown scheme, so the program need not import the package.

    Args:
        scheme: at least two characters: a letter, then letters, digits, ``+``, ``-`` and ``.``. Case does not matter.
        opener: called as ``opener(host, path, **options)``; returns the open store. For ``x://host/path`` the host is
            the text between the slashes. For ``x:path`` the host is empty. Host and path are percent-decoded.
        options: {option: converter}, the options of `opener`. A converter converts the text of the option, or raises
            `ValueError`.

    Raises:
        ValueError: the scheme is registered already, or is malformed.
    """
    name = scheme.lower()
    if not _SCHEME.fullmatch(name + ":"):
        raise ValueError(f"{scheme!r} is not a scheme: use a letter, then one or more letters, digits, '+', '-' or '.'")
    if name in _schemes:
        raise ValueError(f"the scheme {name!r} is registered already; use another name")
    _schemes[name] = _Scheme(opener, dict(options))


def parse_url(address: str | system.os.PathLike[str]) -> tuple[str, str, str, dict[str, str]]:
    """Split `address` into its scheme, host, path and options, and percent-decode them.

    `urlsplit` is not used, because it removes tabs, newlines and carriage returns from a path. `parse_qsl` is not used,
    because it reads ``a+b`` as ``a b``, and drops options without a value.
    """
    if not isinstance(address, str):
        path = system.os.fspath(address)
        if not isinstance(path, str):
            raise TypeError(f"an address must be str or os.PathLike[str], not {type(address).__name__}")
        return "file", "", path, {}
    match = _SCHEME.match(address)
    if match is None:
        if "?" in address:
            raise ValueError(
                f"the path {address!r} contains a question mark: write file:{address} to pass options,"
                " or file: and %3F if it is part of the name"
            )
        return "file", "", _with_home(address), {}
    if "#" in address:
        raise ValueError(f"{address!r} contains a '#', which has no meaning here; write %23 if it is part of the name")
    rest, _, query = address[match.end() :].partition("?")
    host = ""
    if rest.startswith("//"):
        host, slash, rest = rest[2:].partition("/")
        rest = slash + rest
    scheme, path = match.group(1).lower(), _decode(rest)
    return scheme, _decode(host), _with_home(path) if scheme == "file" else path, _options(query)


def file_path(address: str | system.os.PathLike[str]) -> str | None:
    """Return the path of the file store at `address`, or None if `address` names another kind of store."""
    scheme, host, path, _ = parse_url(address)
    return path if scheme == "file" and host in ("", "localhost") else None


def file_url(path: str, options: Mapping[str, object]) -> str:
    """Return the URL of the file store at `path`. `options` are arguments of its constructor."""
    return with_options(f"file:{'//' if path.startswith('/') else ''}{quoted(path)}", options)


def with_options(url: str, options: Mapping[str, object]) -> str:
    """Add `options` to the query of `url`, in the form that `open_store` reads, and return the new URL."""
    for name, value in options.items():
        text = format(value, "o" if name == "mode" else "d") if isinstance(value, int) else str(value)
        url = f"{url}{'&' if '?' in url else '?'}{quoted(name)}={quoted(text)}"
    return url


def absolute(address: str | system.os.PathLike[str]) -> str:
    """Return `address` in a form that does not depend on the current directory."""
    path, text = file_path(address), system.os.fspath(address)
    if path is None:
        return text
    whole = path if path.startswith("/") else system.os.path.abspath(path)
    if text == path:
        return file_url(whole, {}) if "?" in whole else whole
    _, mark, query = text.partition("?")
    return f"file://{quoted(whole)}{mark}{query}"


def quoted(text: str) -> str:
    """Return `text`, percent-encoded for the path or an option of a URL."""
    from urllib.parse import quote  # imported here, as in `_decode`

    return quote(text, errors="surrogateescape")


def _with_home(path: str) -> str:
    """Replace ``~`` or ``~user`` at the beginning of `path` by the home directory, and return the path."""
    return system.os.path.expanduser(path) if path.startswith("~") else path


def _options(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for item in filter(None, query.split("&")):
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"option {name!r} has no value; write {name}=...")
        name = _decode(name)
        if name in options:
            raise ValueError(f"option {name!r} is given twice")
        options[name] = _decode(value)
    return options


def _decode(text: str) -> str:
    bad = _BAD_PERCENT.search(text)
    if bad:
        raise ValueError(
            f"{text!r} contains a percent sign without two hexadecimal digits; write %25 for a percent sign"
        )
    if "%" not in text:
        return text
    from urllib.parse import unquote  # imported here: few addresses need it, and the import takes long

    return unquote(text, errors="surrogateescape")


def _scheme(name: str) -> _Scheme:
    if name not in _schemes:
        from importlib.metadata import entry_points  # imported here: only other packages' schemes need it; it is slow

        for entry in entry_points(group=ENTRY_POINTS, name=name):
            try:
                entry.load()()  # this function registers the scheme
            except Exception as error:
                raise ValueError(f"the entry point {entry.value} of the scheme {name!r} failed: {error}") from error
    if name in _schemes:
        return _schemes[name]
    known = ", ".join(f"{scheme}:" for scheme in sorted(_schemes))
    raise ValueError(
        f"unknown scheme '{name}:' in the store's address; known are {known}."
        " A path with a colon before its first slash is written ./a:b"
    )


def convert(query: dict[str, str], scheme: str) -> dict[str, Any]:
    """Convert the texts of the options `query` to the types that the opener of `scheme` takes.

    Raises:
        ValueError: a text can't be converted.
    """
    converted = {}
    for name, text in query.items():
        kind = _scheme(scheme).options[name]
        try:
            converted[name] = kind(text)
        except ValueError as error:
            wanted = "an integer" if kind is int else "a number" if kind is float else ""
            reason = f"{text!r} is not {wanted}" if wanted else str(error)
            raise ValueError(f"option {name}={text}: {reason}") from error
    return converted


def _yes(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected 1 or 0")


def _open_file(host: str, path: str, *, restart: int | None = None, **options: Any) -> Store:
    if host not in ("", "localhost"):
        raise ValueError(
            f"file://{host}{path} names the host {host!r}; an absolute path has three slashes: file:///..."
        )
    if not path:
        raise ValueError("file: needs a path, such as file:///shared/job/store")
    if restart is not None:
        job = options.get("run_id")
        if not isinstance(job, str) or not job:
            raise ValueError(f"restart={restart} is the restart count of a job: pass the job as well, run_id=JOB")
        options["run_id"] = (job, restart)
    from fscoord.stores.file import FileStore

    return FileStore(system.os.fsencode(path), **options)  # bytes, because a path may look like an address


def _open_memory(host: str, path: str, **options: Any) -> Store:
    from fscoord.stores.memory import HashStore

    return HashStore.named(host + path, **options) if host + path else HashStore(**options)


def _open_tcp(host: str, path: str, **options: Any) -> Store:
    name, colon, port = host.rpartition(":")
    if not colon or not name or not port.isdigit() or path.strip("/"):
        raise ValueError(f"tcp://{host}{path} is not of the form tcp://host:port")
    from fscoord.stores.tcp import TCPStore

    return TCPStore(name.removeprefix("[").removesuffix("]"), int(port), **options)


def _open_etcd(host: str, path: str, *, rank: int | None = None, **options: Any) -> Store:
    prefix = path.removeprefix("/")
    if not host or not prefix:
        raise ValueError(f"etcd://{host}{path} is not of the form etcd://host:port,host:port/prefix")
    from fscoord.stores.etcd import EtcdStore

    store = EtcdStore(host, prefix, **options)
    if rank is not None:
        try:
            store.announce_rank(rank)
        except BaseException:
            store.close()
            raise
    return store


def _octal(text: str) -> int:
    try:
        return int(text, base=8)
    except ValueError:
        raise ValueError(f"{text!r} is not a mode in octal, such as 0660") from None


register_scheme(
    "file",
    _open_file,
    {
        "timeout": float,
        "mode": _octal,
        **dict.fromkeys(("world_size", "rank", "compact_bytes", "spill_bytes", "restart"), int),
        **dict.fromkeys(("label", "lock", "coherence", "watch", "run_id", "trace"), str),
        **dict.fromkeys(("durable", "read_only", "trust_locks"), _yes),
    },
)
register_scheme("mem", _open_memory, {"timeout": float})
register_scheme(
    "tcp",
    _open_tcp,
    {
        "timeout": float,
        "world_size": int,
        **dict.fromkeys(("is_master", "wait_for_workers", "multi_tenant", "use_libuv"), _yes),
    },
)
register_scheme(
    "etcd",
    _open_etcd,
    {
        "timeout": float,
        **dict.fromkeys(("session_ttl", "rank"), int),
        "tls": _yes,
        **dict.fromkeys(("user", "password", "cacert", "cert", "key"), str),
    },
)
