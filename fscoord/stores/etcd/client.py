"""`Client`, one process's connections to the members of an etcd cluster, and `Access`, its addresses and credentials.

The HTTP library is urllib3, which etcd3gw uses as well. etcd3gw itself is not used, for four reasons. It takes only one
address, it does not report the revision from which to watch, it can't end a watch, and it takes twice as long for a
request (``benchmarks etcd``).

grpcio is not used either. A read by a bare grpcio 1.85 call, without decoding the answer, took 442 us where
`~fscoord.EtcdStore.get` took 1,107 and a bare urllib3 request 842 (p50, one etcd 3.4 on loopback, 15 rounds in turns,
busy machine). A change (``Put``) took 1,084 us instead of 1,605, and most of that time is etcd's sync of its disk. The
gain does not justify 19 MB of compiled code and grpcio's restrictions on forks (its ``doc/fork_support.md``).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import (
    FscoordError,
    LimitExceededError,
    StoreClosedError,
    StoreError,
    StoreUnavailableError,
    needed_extra,
)
from fscoord.stores.etcd.requests import Request

if TYPE_CHECKING:
    from fscoord.stores.etcd import GatewayClient

PORT: Final = 2379
"""The port of an address that names none. It is etcd's default port."""

CONNECTIONS: Final = 64
"""The most idle connections that are kept for each member. Each thread that makes a call uses one connection."""

BODY_MAX: Final = 16 << 20
"""The most bytes of a request. etcd's manual warns of requests over 10 MiB, and base64 makes four bytes of three."""

FIRST_PAUSE_S: Final = 0.01
LONGEST_PAUSE_S: Final = 0.5

CONNECT_MIN_S: Final = 0.2
ANSWER_MIN_S: Final = 1.0
"""The least time in seconds that a member has to answer a read, if another member can be asked next."""

SILENCE_MAX_S: Final = 5.0
"""How many seconds a read waits for one member before it asks another member.

It is also the least time that the last member, and a member that has received a write, have for their answer. Before
some answers a member must sync its disk, which took over a second where other programs wrote to the same disk.
"""

# Codes of gRPC (https://grpc.io/docs/guides/status-codes/) for requests that were refused, and so have had no effect.
INVALID, NOT_FOUND, DENIED, EXHAUSTED, PRECONDITION, OUT_OF_RANGE, UNAUTHENTICATED = 3, 5, 7, 8, 9, 11, 16

_ENDPOINT: Final = r"(?:(?P<scheme>[a-z]+)://)?(?:\[(?P<address>[0-9A-Fa-f:.%]+)\]|(?P<name>[^\[\]/:@,\s]+))(?::(?P<port>[0-9]{1,5}))?/?"


class Access(NamedTuple):
    """The addresses of a cluster's members, and the credentials for the cluster.

    Attributes:
        endpoints: host and port of each member.
        tls: whether to use TLS.
        cacert: the file with the certificates to trust, instead of the system's certificates.
        cert: the file with the certificate of the client.
        key: the file with the key of that certificate.
        user: the user name, or None.
        password: the user's password.
    """

    endpoints: tuple[tuple[str, int], ...]
    tls: bool = False
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str = ""

    def __str__(self) -> str:
        """Return the addresses, without credentials."""
        names = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.endpoints)
        return f"etcd://{','.join(names)}"

    def url(self, prefix: bytes, **options: object) -> str:
        """Return the address by which `~fscoord.open_store` opens the store with `prefix`. It contains the password."""
        from urllib.parse import quote, urlencode

        known = {"cacert": self.cacert, "cert": self.cert, "key": self.key, "user": self.user}
        given = {name: value for name, value in known.items() if value is not None} | options
        if self.tls:
            given["tls"] = 1
        if self.user is not None:
            given["password"] = self.password
        return f"{quote(str(self), safe='/:,[]')}/{quote(prefix)}?{urlencode(given, quote_via=quote)}"


def parse_access(
    client_or_url: str | GatewayClient | Access, *, tls: bool, cacert: str | None, cert: str | None, key: str | None
) -> Access:
    """Return the access that the arguments of an `~fscoord.EtcdStore` describe.

    Raises:
        ValueError: `client_or_url` is not an address, or two of its parts contradict each other.
        TypeError: `client_or_url` is neither text nor a client of etcd3gw.
    """
    if isinstance(client_or_url, Access):
        return client_or_url
    if (cert is None) != (key is None):
        raise ValueError(
            "cert and key must be given together: the client's certificate, and the private key of this certificate"
        )
    if not isinstance(client_or_url, str):
        known = _access_of_client(client_or_url)
        return known._replace(cacert=cacert or known.cacert, cert=cert or known.cert, key=key or known.key)
    text = client_or_url.removeprefix("etcd://")
    endpoints, schemes = [], set()
    for each in text.split(","):
        match = re.fullmatch(_ENDPOINT, each.strip())
        if match is None or match["scheme"] not in (None, "http", "https") or int(match["port"] or 1) > 65535:
            raise ValueError(
                f"{each!r} in {client_or_url!r} is not the address of an etcd member; write host:port or [::1]:port,"
                " and commas between several"
            )
        schemes.add(match["scheme"] or "")
        endpoints.append((match["address"] or match["name"], int(match["port"] or PORT)))
    if {"http", "https"} <= schemes or ("http" in schemes and (tls or cacert or cert)):
        raise ValueError(
            f"{client_or_url!r} mixes addresses with TLS and without: https:// and http://, or http:// and one of tls,"
            " cacert and cert"
        )
    secure = tls or "https" in schemes or cacert is not None or cert is not None
    return Access(tuple(endpoints), secure, cacert, cert, key)


def _access_of_client(client: GatewayClient) -> Access:
    """Return the address and TLS files of a client of etcd3gw."""
    try:
        host, port, session = str(client.host), int(client.port), client.session
        secure = client.protocol == "https"
    except AttributeError:
        raise TypeError(
            f"an etcd cluster is given as text or as a client of etcd3gw, not as {type(client).__name__}"
        ) from None
    cert, key = session.cert if isinstance(session.cert, tuple) else (session.cert, session.cert)
    cacert = session.verify if isinstance(session.verify, str) else None
    return Access(((host, port),), secure, cacert, cert, key)


class CompactedError(FscoordError):
    """etcd has removed the requested revision by a compaction; the caller must read again."""


class _NotSent(Exception):
    """The request has had no effect: no member received it, or the member refused it before reading it."""


class _Unanswered(Exception):
    """The request may have had an effect: a member may have received it, and the response was lost."""


class _Unauthenticated(Exception):
    """The token is no longer valid."""


class Client:
    """The connections to the members of a cluster. A request is first sent to the member that answered last.

    Threads share the pools of connections, which have locks of their own. `_lock` guards the set of open streams.
    """

    def __init__(self, access: Access) -> None:
        self.access = access
        with needed_extra("EtcdStore", "urllib3", "etcd"):
            import urllib3
        self._urllib3: Any = urllib3
        self._failures = self._urllib3.exceptions
        self._is_closed = False
        self._connect()
        _all.add(self)

    def __str__(self) -> str:
        return str(self.access)

    def call(self, path: str, body: Request, limit: float, *, writes: bool = False) -> dict[str, Any]:
        """Return the answer to the request `body`.

        A read is sent to one member after the other, until a member answers. A write is repeated only if the failed try
        can't have had an effect, because there was no connection or the member refused the request. If the response of
        a write is lost, etcd may commit the write at once, later, or never, and no later request can determine which.
        So the write is not repeated, and the error has `maybe_applied` set.

        Raises:
            StoreUnavailableError: no member answered within `limit` seconds, or the server refuses. For a write whose
                response was lost, `maybe_applied` is true.
            LimitExceededError: the request is larger than the server accepts.
            CompactedError: the requested revision is gone.
        """
        data = json.dumps(body).encode()
        if len(data) > BODY_MAX:
            raise self._too_large(
                f"a request of {len(data)} bytes is over the limit of {BODY_MAX} of every etcd server"
            )
        ends = system.time.monotonic() + limit
        pause = FIRST_PAUSE_S
        while True:
            failure = self._ask_each(path, data, ends, writes)
            if isinstance(failure, dict):
                return failure
            left = ends - system.time.monotonic()
            if left <= 0:
                why = str(failure).removeprefix(f"{self}: ")
                raise StoreUnavailableError(
                    f"timeout: {self}: no answer within {limit:.3g} s ({why}); check that etcd runs there, and that the"
                    " port is open"
                ) from failure.__cause__
            system.time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def open_stream(self, request: Request, limit: float) -> Stream | None:
        """Return the stream of answers to `request` for a watch, which the caller must close.

        Return None if there is no connection, or no answer within `limit` seconds.
        """
        data = json.dumps(request).encode()
        try:
            response = self._post(self._first, "watch", data, limit, limit, streams=True)
        except (_NotSent, _Unanswered):
            return None
        if response.status != 200:  # the caller's next read fails for the same reason, and raises the error
            response.close()
            return None
        stream = Stream(response, self._failures)
        with self._lock:
            self._streams.add(stream)
        if self._is_closed:  # another thread called `close`, which may not have found this stream
            stream.interrupt()
        return stream

    def close_stream(self, stream: Stream) -> None:
        """Close `stream` and its connection.

        Raises:
            StoreClosedError: another thread has called `close` meanwhile, which interrupts the stream.
        """
        with self._lock:
            self._streams.discard(stream)
        stream.close()
        self.refuse_if_closed()

    def refuse_if_closed(self) -> None:
        """Raise `StoreClosedError` if `close` was called."""
        if self._is_closed:
            raise StoreClosedError(f"{self}: this handle was closed; open the store again")

    def close(self) -> None:
        """Close all connections. Threads that wait on one of them raise `StoreClosedError`."""
        system.process_epoch()  # in a child of a fork(2) in C this abandons the parent's connections
        self._is_closed = True
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.interrupt()
        for pool in self._pools:
            pool.close()

    def after_fork(self) -> None:
        """Abandon the inherited connections in a forked child.

        If two processes used one connection, each could read the answers to the other's requests. urllib3 empties the
        queue of a pool when the pool is destroyed, and at the end of the process. A thread of the parent may have held
        the lock of this queue during the fork. So the queue is initialized again in place.
        """
        for pool in self._pools:
            if pool.pool is not None:
                pool.pool.__init__(pool.pool.maxsize)
        self._connect()

    def _connect(self) -> None:
        """Make the pools of connections. A pool connects at its first request."""
        access = self.access
        self._lock = system.threading.Lock()
        self._streams: set[Stream] = set()
        self._token: str | None = None
        self._first = 0
        options: dict[str, Any] = {"maxsize": CONNECTIONS, "block": False}
        kind = self._urllib3.HTTPConnectionPool
        if access.tls:
            kind = self._urllib3.HTTPSConnectionPool
            options |= {
                "ca_certs": access.cacert,
                "cert_file": access.cert,
                "key_file": access.key,
                "cert_reqs": "CERT_REQUIRED",
            }
        self._pools = [kind(host, port, **options) for host, port in access.endpoints]

    def _ask_each(self, path: str, data: bytes, ends: float, writes: bool) -> dict[str, Any] | Exception:
        """Return the answer of the first member that answers. If no member answers, return the last failure."""
        failure: Exception = _NotSent("no member was asked")
        for turn in range(len(self._pools)):
            index = (self._first + turn) % len(self._pools)
            left = ends - system.time.monotonic()
            others = len(self._pools) - turn - 1
            share = min(left / (others + 1), SILENCE_MAX_S) if others else left
            answer = max(left, SILENCE_MAX_S) if writes or not others else max(share, ANSWER_MIN_S)
            try:
                reply = self._answer(index, path, data, max(share, CONNECT_MIN_S), answer)
            except _NotSent as error:
                failure = error
            except _Unanswered as error:
                failure = error
                if writes:  # another member would commit it a second time
                    raise StoreUnavailableError(
                        f"{self}: {error}; this write may or may not have taken effect", maybe_applied=True
                    ) from error.__cause__
            else:
                self._first = index
                return reply
            if system.time.monotonic() >= ends:
                break
        return failure

    def _answer(self, index: int, path: str, data: bytes, connect: float, read: float) -> dict[str, Any]:
        try:
            return self._parse(self._post(index, path, data, connect, read), index)
        except _Unauthenticated:  # the token has expired, or the permissions have changed: log in again, once
            self._token = None
        try:
            return self._parse(self._post(index, path, data, connect, read), index)
        except _Unauthenticated as error:
            raise self._denied(str(error)) from None

    def _post(self, index: int, path: str, data: bytes, connect: float, read: float, *, streams: bool = False) -> Any:
        self.refuse_if_closed()
        system.process_epoch()
        headers = {"Content-Type": "application/json"}
        if streams:
            headers["Grpc-Metadata-hasleader"] = "true"  # a member that is cut off from the others then ends the watch
        if self.access.user is not None and path != "auth/authenticate":
            headers["Authorization"] = self._token or self._log_in(index, connect)
        failures = self._failures
        system.occupy_standard_descriptors()  # the pool may open a connection
        try:
            return self._pools[index].urlopen(
                "POST",
                f"/v3/{path}",
                body=data,
                headers=headers,
                retries=False,
                timeout=self._urllib3.Timeout(connect=_timeout(connect), read=_timeout(read)),
                preload_content=not streams,
            )
        except (failures.NewConnectionError, failures.ConnectTimeoutError) as error:
            raise _NotSent(f"{self._member(index)}: {_innermost_message(error)}") from error
        except (failures.HTTPError, OSError) as error:
            self.refuse_if_closed()
            message = _innermost_message(error)
            is_cut_off = "EOF" in message or "reset" in message  # of a TLS error: only the connection has ended
            if isinstance(error, failures.SSLError) and not is_cut_off:
                raise StoreUnavailableError(
                    f"{self._member(index)}: {message}; check which certificates both sides trust"
                ) from error
            raise _Unanswered(f"{self._member(index)}: {message}") from error

    def _parse(self, response: Any, index: int) -> dict[str, Any]:
        """Return the reply in `response`, or raise the error that it reports."""
        try:
            reply = json.loads(response.data)
        except ValueError:
            reply = None
        if response.status == 200 and isinstance(reply, dict):
            return reply
        message = f"{self._member(index)}: HTTP {response.status}, {response.data[:200]!r}"
        if not isinstance(reply, dict):
            if response.status >= 500:
                raise _Unanswered(message)
            raise StoreUnavailableError(
                f"{message}; this is not how etcd 3.4 or newer answers: check the address and the server's version"
            )
        raise self._error(int(reply.get("code", 0)), str(reply.get("message") or reply.get("error") or message))

    def _error(self, code: int, message: str) -> Exception:
        """Return the exception for an error of etcd (https://github.com/etcd-io/etcd/, ``rpctypes/error.go``)."""
        if code == UNAUTHENTICATED or "revision in header is old" in message or "user name is empty" in message:
            return _Unauthenticated(message)
        if any(words in message for words in ("too large", "too many operations", "larger than max")):
            return self._too_large(message)
        if code == DENIED or "invalid user ID or password" in message:
            return self._denied(message)
        if code == OUT_OF_RANGE:
            return CompactedError(f"{self}: {message}")
        if "space exceeded" in message:
            return StoreUnavailableError(f"{self}: {message}; nothing was written", errno=system.errno.ENOSPC)
        if code == EXHAUSTED:  # too many requests at once
            return _NotSent(message)
        if code in (INVALID, NOT_FOUND, PRECONDITION):
            return StoreError(f"{self}: {message}; nothing was written")
        return _Unanswered(f"{self}: {message}")

    def _too_large(self, message: str) -> LimitExceededError:
        return LimitExceededError(
            f"{self}: {message}; nothing was written. The server's limits are --max-request-bytes (1.5 MiB by default)"
            " and --max-txn-ops (128)"
        )

    def _denied(self, message: str) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"{self}: {message}; check the user, the password, and the role's permissions on the prefix",
            errno=system.errno.EACCES,
        )

    def _log_in(self, index: int, limit: float) -> str:
        body = json.dumps({"name": self.access.user, "password": self.access.password}).encode()
        try:
            reply = self._parse(self._post(index, "auth/authenticate", body, limit, limit), index)
        except _Unanswered as error:  # the request that needs the token was not sent yet
            raise _NotSent(str(error)) from error
        self._token = token = str(reply["token"])
        return token

    def _member(self, index: int) -> str:
        return str(self.access._replace(endpoints=self.access.endpoints[index : index + 1]))


class Stream:
    """A stream of answers that arrive one after the other on one connection, such as those of a watch."""

    def __init__(self, response: Any, failures: Any) -> None:
        self._response = response
        self._failures = failures
        self._chunks = response.stream(1 << 16)
        self._rest = b""

    def next(self, limit: float) -> dict[str, Any] | None:
        """Return the next answer. Return None if no answer comes within `limit` seconds, or the connection is lost."""
        ends = system.time.monotonic() + limit
        while b"\n" not in self._rest:
            left = ends - system.time.monotonic()
            if left <= 0:
                return None
            try:
                self._response.connection.sock.settimeout(left)
                self._rest += next(self._chunks)
            except (self._failures.HTTPError, OSError, StopIteration, AttributeError, ValueError):
                return None  # timed out, cut off, ended or interrupted (AttributeError: the connection is gone)
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            return dict(json.loads(line).get("result") or {"canceled": True})
        except ValueError:
            return None

    def interrupt(self) -> None:
        """Make `next` return, if any thread is calling it."""
        try:
            self._response.shutdown()
        except (OSError, ValueError, RuntimeError) as error:  # it is closed already
            raise_if_foreign(error, "urllib3")

    def close(self) -> None:
        """Close the connection. The server then ends the watch."""
        self._response.close()


_all = system.reset_in_child("etcd connections", Client.after_fork)


def _timeout(limit: float) -> float | None:
    """Return `limit` in the form in which urllib3 takes a timeout: a positive number, or None for no limit."""
    return None if limit > system.threading.TIMEOUT_MAX else max(limit, 0.001)


def _innermost_message(error: BaseException) -> str:
    """Return the message of the innermost exception that `error` wraps."""
    inner: Any = error
    while isinstance(inner, Exception) and inner.args and isinstance(inner.args[-1], Exception):
        inner = inner.args[-1]
    message = str(inner.strerror or inner) if isinstance(inner, OSError) else str(inner)
    return message.rpartition(": ")[2].rstrip(".") if "HTTP" in message else message or type(inner).__name__
