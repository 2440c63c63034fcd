"""Network functions for the other modules: host names, addresses, ports, connections, and a host-wide mutex.

Only this module imports `socket`. This module is separate from `system`, because `socket` is slow to import and few
programs need `socket`.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

from fscoord._runtime import system
from fscoord._runtime.interrupts import ignoring, raise_if_foreign

Endpoint = tuple[socket.AddressFamily, Any]
"""An address family, and the address and port for `socket.connect`."""

_ELSEWHERE: Final = ("192.0.2.1", 9)
"""An address that no host has, because it is reserved for documentation (RFC 5737)."""

LONGEST_S: Final = 1e6
"""The longest timeout that is passed to a socket, in seconds. The system rejects much longer timeouts."""


def is_ip_address(text: str) -> bool:
    """Return whether `text` is an IPv4 or IPv6 address."""
    return _address(text) is not None


def is_this_host(name: str) -> bool:
    """Return whether `name`, a host name or an IP address, belongs to this host, according to the resolver."""
    address = _address(name)
    if name.lower() == "localhost" or (address is not None and address.is_loopback):
        return True
    own = system.hostname()
    if name.lower() == own.lower():
        return True
    own_addresses, own_names = _resolve(own)
    if address is not None:
        return str(address) in own_addresses
    return name.lower() in own_names or bool(own_addresses & _resolve(name)[0])


def free_port() -> int:
    """Return a TCP port that is free now. Another process may bind the port before the caller binds it."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as server:
        port: int = server.getsockname()[1]
        return port


def own_name() -> str:
    """Return a name or an address by which other hosts can reach this host.

    Return the host name if the resolver knows it. Otherwise return the source address that this host would use for
    another network, or the loopback address if no other network can be reached.
    """
    name = system.hostname()
    if _resolve(name)[0]:
        return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with ignoring(OSError):
            probe.connect(_ELSEWHERE)  # only selects the route: a datagram socket sends nothing here
            address: str = probe.getsockname()[0]
            return address
        return "127.0.0.1"


def resolve(host: str, port: int) -> list[Endpoint]:
    """Return the endpoints of `port` on `host`. The resolver has no time limit.

    Raises:
        OSError: the resolver does not know `host`.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(system.errno.EINVAL, f"{host!r} is not a host's name: {error}") from error
    return [(family, address) for family, _, _, _, address in found]


def connect(endpoints: Sequence[Endpoint], ends: float) -> socket.socket:
    """Return a connection, with ``TCP_NODELAY`` set, to the first of `endpoints` that accepts a connection.

    Args:
        endpoints: the endpoints, in the order in which they are tried.
        ends: the deadline, by the monotonic clock.

    Raises:
        OSError: no endpoint accepted a connection. The error is that of the last endpoint.
    """
    failure = OSError(system.errno.EADDRNOTAVAIL, "the host has no address")
    system.occupy_standard_descriptors()
    for number, (family, address) in enumerate(endpoints):
        left = (ends - system.time.monotonic()) / (len(endpoints) - number)
        try:
            found = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise_if_foreign(error)
            failure = error
            continue
        try:
            found.settimeout(min(max(left, 0.001), LONGEST_S))
            code = found.connect_ex(address)
            if code == 0:
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return found
        except BaseException:
            found.close()
            raise
        found.close()
        if code == system.errno.EAGAIN:
            code = system.errno.ETIMEDOUT
        failure = OSError(code, system.os.strerror(code))
    raise failure


def drop_unsent(connection: socket.socket) -> None:
    """Make close(2) reset `connection`, so that the kernel discards unsent data."""
    with ignoring(OSError):  # closed already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def acquire_host_mutex(name: str) -> socket.socket | None:
    """Try to acquire the mutex `name`, which all processes in this host's network namespace share.

    The mutex is a socket bound to the abstract address `name` (unix(7)). The mutex is released when the socket is
    closed or the process ends.

    Returns:
        The socket. None if another process holds the mutex, or if the system has no abstract socket addresses.
    """
    if system.platform() != "linux" or system.is_fake_fs():
        return None
    system.occupy_standard_descriptors()
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    _names.add(found)
    with ignoring(OSError):
        found.bind(f"\0{name}")
        return found
    found.close()
    return None


def datagram_sockets(sockets: list[Any]) -> None:
    """Add two non-blocking UNIX datagram sockets (unix(7)) to the list `sockets`."""
    system.occupy_standard_descriptors()
    # In one chain of C calls, so that an interruption loses no socket. (`socket.socket` is a Python class.)
    sockets.extend(map(socket.SocketType, [socket.AF_UNIX] * 2, [socket.SOCK_DGRAM] * 2))
    for each in sockets:
        each.setblocking(False)


# A child closes the inherited sockets, which would hold the parent's mutexes for as long as the child lives.
_names = system.reset_in_child("names", socket.socket.close)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _resolve(name: str) -> tuple[set[str], set[str]]:
    """Return the addresses and the canonical names of `name`; empty sets if `name` can't be resolved."""
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP, flags=socket.AI_CANONNAME)
    except (OSError, UnicodeError) as error:
        raise_if_foreign(error)
        return set(), set()
    return {str(each[4][0]) for each in found}, {each[3].lower() for each in found if each[3]}
