"""The network as fscoord sees it: names and addresses of this host, free ports, connections, names that one can take.

It stands beside `_system`, as the only module that imports `socket`, because few need it and it takes a while to load.
"""

from __future__ import annotations

import ipaddress
import socket
from weakref import WeakSet

from fscoord import _system as system

__all__ = ["connect", "free_port", "is_ip_address", "is_this_host", "take_name"]


def is_ip_address(text: str) -> bool:
    """Return whether `text` is an IPv4 or IPv6 address."""
    return _address(text) is not None


def is_this_host(name: str) -> bool:
    """Return whether `name`, a host name or an IP address, leads to this host, as far as the resolver knows."""
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
    """Return a TCP port that nobody listens on at this moment; somebody else may take it in the next."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as server:
        port: int = server.getsockname()[1]
        return port


def connect(host: str, port: int, limit: float) -> socket.socket:
    """Return a connection to `port` of `host` on which nothing is held back to be sent with more (``TCP_NODELAY``).

    Raises:
        OSError: there is none, within `limit` seconds for each address of that name.
    """
    connection = socket.create_connection((host, port), min(limit, 1e6))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def take_name(name: str) -> socket.socket | None:
    """Return what keeps `name` from all others on this host's network until its ``with`` ends, or this process does.

    None if somebody has it, or if there is nothing of that kind here: it is an abstract socket address (unix(7)).
    """
    if system.platform() != "linux" or system.is_faked():
        return None
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    _names.add(found)
    try:
        found.bind(f"\0{name}")
    except OSError:
        found.close()
        return None
    return found


_names: WeakSet[socket.socket] = WeakSet()


def _after_fork_in_child() -> None:
    """Close what would keep a name from all others for as long as the child lives."""
    for found in list(_names):
        found.close()


system.after_fork_in_child("names", _after_fork_in_child)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _resolve(name: str) -> tuple[set[str], set[str]]:
    """Return the addresses and the canonical names of `name`; none where it can't be resolved."""
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP, flags=socket.AI_CANONNAME)
    except (OSError, UnicodeError):
        return set(), set()
    return {str(each[4][0]) for each in found}, {each[3].lower() for each in found if each[3]}
