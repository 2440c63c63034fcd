"""Where an etcd cluster is: `Access`, and what people write for it."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

__all__ = ["PORT", "Access", "access_of"]

PORT: Final = 2379
"""etcd's own port, where an address names none."""

_ENDPOINT: Final = r"(?:(?P<scheme>[a-z]+)://)?(?:\[(?P<address>[0-9A-Fa-f:.%]+)\]|(?P<name>[^\[\]/:@,\s]+))(?::(?P<port>[0-9]{1,5}))?/?"


class Access(NamedTuple):
    """Where a cluster is and who may use it.

    Attributes:
        endpoints: host and port of each member.
        tls: whether to speak TLS.
        cacert: the file with the certificates to trust, instead of the system's.
        cert: the file with the client's own certificate.
        key: the file with its key.
        user: the name to log in with, or None.
        password: its password.
    """

    endpoints: tuple[tuple[str, int], ...]
    tls: bool = False
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str = ""

    def __str__(self) -> str:
        """Say where the cluster is."""
        names = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.endpoints)
        return f"etcd://{','.join(names)}"

    def url(self, prefix: bytes, **options: object) -> str:
        """Return the address, password included, with which `~fscoord.open_store` opens the store with `prefix`."""
        from urllib.parse import quote, urlencode

        known = {"cacert": self.cacert, "cert": self.cert, "key": self.key, "user": self.user}
        given = {name: value for name, value in known.items() if value is not None} | options
        if self.tls:
            given["tls"] = 1
        if self.user is not None:
            given["password"] = self.password
        return f"{quote(str(self), safe='/:,[]')}/{quote(prefix)}?{urlencode(given, quote_via=quote)}"


def access_of(client_or_url: Any, *, tls: bool, cacert: str | None, cert: str | None, key: str | None) -> Access:
    """Return what `client_or_url` stands for; see `~fscoord.EtcdStore`.

    Raises:
        ValueError: it is no address.
        TypeError: it is neither text nor a client.
    """
    if isinstance(client_or_url, Access):
        return client_or_url
    if (cert is None) != (key is None):
        raise ValueError("cert and key go together: the client's certificate, and the key that it is for")
    if not isinstance(client_or_url, str):
        known = _of_client(client_or_url)
        return known._replace(cacert=cacert or known.cacert, cert=cert or known.cert, key=key or known.key)
    text = client_or_url.removeprefix("etcd://")
    endpoints, schemes = [], set()
    for each in text.split(","):
        match = re.fullmatch(_ENDPOINT, each.strip())
        if match is None or match["scheme"] not in (None, "http", "https") or int(match["port"] or 1) > 65535:
            raise ValueError(
                f"{each!r} in {client_or_url!r} is no address of an etcd member; write host:port, or [::1]:port, and"
                " several with commas between them"
            )
        schemes.add(match["scheme"] or "")
        endpoints.append((match["address"] or match["name"], int(match["port"] or PORT)))
    if {"http", "https"} <= schemes or ("http" in schemes and (tls or cacert or cert)):
        raise ValueError(f"{client_or_url!r}: some of it says TLS and some says none")
    secure = tls or "https" in schemes or cacert is not None or cert is not None
    return Access(tuple(endpoints), secure, cacert, cert, key)


def _of_client(client: Any) -> Access:
    """Return where a client of etcd3gw leads to."""
    try:
        host, port, session = str(client.host), int(client.port), client.session
        secure = client.protocol == "https"
    except AttributeError:
        raise TypeError(
            f"an etcd cluster is named by text or by an etcd3gw client, not {type(client).__name__}"
        ) from None
    cert, key = session.cert if isinstance(session.cert, tuple) else (session.cert, session.cert)
    cacert = session.verify if isinstance(session.verify, str) else None
    return Access(((host, port),), secure, cacert, cert, key)
