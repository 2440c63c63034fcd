"""Endpoints ``host[:port]``: parsing them, and whether one means this host."""

from __future__ import annotations

import re

from fscoord._runtime import network

__all__ = ["DEFAULT_PORT", "matches_machine_hostname", "parse_rendezvous_endpoint"]

DEFAULT_PORT = 29400
"""The port of a TCP rendezvous whose endpoint names none; torch's."""

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Return host and port of ``host``, ``host:port``, ``[v6]``, ``[v6]:port`` or a bare IPv6 address.

    An empty endpoint is ``localhost``. A bare address with two colons or more is all address (torch takes the ``1``
    of ``::1`` for a port).

    Raises:
        ValueError: the port is no integer from 0 to 65535, or the host is neither a name nor an address.
    """
    text = (endpoint or "").strip()
    if not text:
        return "localhost", default_port
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not network.is_ip_address(host) or (rest and rest[0] != ":"):
            raise ValueError(f"the rendezvous endpoint {text!r} is no [IPv6 address]:port")
    elif text.count(":") > 1:
        host, rest = text, ""
        if not network.is_ip_address(host):
            raise ValueError(f"the rendezvous endpoint {text!r} is no IPv6 address; with a port it is [address]:port")
    else:
        host, colon, port = text.partition(":")
        rest = colon + port
        if not _HOST.fullmatch(host):
            raise ValueError(f"the host in the rendezvous endpoint {text!r} is neither a name nor an address")
    return host, _port(rest[1:], text) if rest else default_port


def matches_machine_hostname(host: str) -> bool:
    """Return whether `host`, a name or an address, is this machine, as far as its resolver knows.

    It decides who hosts a TCP store; ``is_host`` overrides it.
    """
    return network.is_this_host(host)


def _port(text: str, endpoint: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise ValueError(f"the port in the rendezvous endpoint {endpoint!r} is no integer from 0 to 65535")
    return int(text)
