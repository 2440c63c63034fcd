"""The network as fscoord sees it: names and addresses of this host, free ports, and connections.

It stands beside `_system`, as the only module that imports `socket`, because few need it and it takes a while to load.
"""

from __future__ import annotations

import ipaddress
import socket

from fscoord import _system as system
from fscoord._foreign import raise_if_foreign

__all__ = ["connect", "free_port", "is_ip_address", "is_this_host"]


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


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _resolve(name: str) -> tuple[set[str], set[str]]:
    """Return the addresses and the canonical names of `name`; none where it can't be resolved."""
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP, flags=socket.AI_CANONNAME)
    except (OSError, UnicodeError) as error:
        raise_if_foreign(error)
        return set(), set()
    return {str(each[4][0]) for each in found}, {each[3].lower() for each in found if each[3]}
