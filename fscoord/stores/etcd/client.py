"""`Client`, the connections to the members of an etcd cluster, and `Access`, the addresses and credentials.

The HTTP library is urllib3. etcd3gw is not used, for four reasons: etcd3gw takes only one address, does not report the
revision from which to watch, can't end a watch, and takes twice as long for a request (``benchmarks etcd``).

grpcio is not used either. A read took 442 us with a bare call of grpcio, and 1,107 us with `~fscoord.EtcdStore.get`
(medians, etcd 3.4 on loopback). For a write the times were 1,084 us and 1,605 us. This gain does not justify 19 MB of
compiled code and grpcio's restrictions on forks (its ``doc/fork_support.md``).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import (
    CompactedError,
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
"""The port of an address without a port: etcd's default port."""

CONNECTIONS: Final = 64
"""How many idle connections are kept for each member. Each thread uses one connection during a call."""

BODY_MAX: Final = 16 << 20
"""The largest request, in bytes. etcd's manual warns of requests over 10 MiB, and base64 makes a request a third
larger."""

FIRST_PAUSE_S: Final = 0.01
LONGEST_PAUSE_S: Final = 0.5

CONNECT_MIN_S: Final = 0.2
ANSWER_MIN_S: Final = 1.0
"""The shortest time, in seconds, that a read waits for one member before it asks the next member."""

SILENCE_MAX_S: Final = 5.0
"""The longest time, in seconds, that a read waits for one member before it asks the next member.

A write, and a read from the last member, wait at least this long, even if the timeout is shorter. The reason is that a
member may have to sync its disk before it answers. A sync can take more than a second if other programs use the same
disk.
"""

# Codes of gRPC (https://grpc.io/docs/guides/status-codes/) for refused requests, which have had no effect.
INVALID, NOT_FOUND, DENIED, EXHAUSTED, PRECONDITION, OUT_OF_RANGE, UNAUTHENTICATED = 3, 5, 7, 8, 9, 11, 16

_ENDPOINT: Final = r"(?:(?P<scheme>[a-z]+)://)?(?:\[(?P<address>[0-9A-Fa-f:.%]+)\]|(?P<name>[^\[\]/:@,\s]+))(?::(?P<port>[0-9]{1,5}))?/?"


class Access(NamedTuple):
    """The addresses of the members of a cluster, and the credentials of the user.

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
        """Return the address of the store with `prefix` for `~fscoord.open_store`. It contains the password."""
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
    """Convert the arguments of an `~fscoord.EtcdStore` to an `Access`.

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
            " cacert and cert; write https:// for all members"
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


class _NotSent(Exception):
    """Raised if a request had no effect: no member received the request, or a member refused the request."""


class _Unanswered(Exception):
    """Raised if a request may have had an effect: a member may have received the request, but the response was lost."""


class _Unauthenticated(Exception):
    """Raised if the token of the login is no longer valid."""


class Client:
    """Sends requests to the members of a cluster, first to the member that has answered the last request.

    Threads share the pools of connections, which are thread-safe. `_lock` guards the set of open streams.
    """

    def __init__(self, access: Access) -> None:
        self.access = access
        with needed_extra("EtcdStore", "urllib3", "etcd"):
            import urllib3
        self._urllib3: Any = urllib3
        self._failures = self._urllib3.exceptions
        self.is_closed = False
        self._connect()
        _all.add(self)

    def __str__(self) -> str:
        return str(self.access)

    def call(self, path: str, body: Request, limit: float, *, writes: bool = False) -> dict[str, Any]:
        """Send the request `body`, and return the answer.

        A read is sent to one member after the other, until a member answers. A write is sent to the next member only if
        the failed try had no effect: there was no connection, or the member refused the request. If the response of a
        write is lost, etcd may commit the write at once, later, or never. So the write is not sent again.

        Raises:
            StoreUnavailableError: no member answered within `limit` seconds, or the server refused the request. If the
                response of a write was lost, `maybe_applied` is true.
            LimitExceededError: the request is larger than the server accepts.
            CompactedError: etcd has removed the requested revision.
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
        """Begin the watch `request`, and return the stream of its answers. The caller must close the stream.

        Return None if no member can be reached, or if no member answers within `limit` seconds.
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
        if self.is_closed:  # another thread called `close`, which may not have found this stream
            stream.interrupt()
        return stream

    def close_stream(self, stream: Stream) -> None:
        """Close `stream` and its connection.

        Raises:
            StoreClosedError: another thread has closed the client.
        """
        with self._lock:
            self._streams.discard(stream)
        stream.close()
        self.refuse_if_closed()

    def refuse_if_closed(self) -> None:
        """Raise `StoreClosedError` if `close` was called."""
        if self.is_closed:
            raise StoreClosedError(f"{self}: this handle was closed; open the store again")

    def close(self) -> None:
        """Close all connections. Waits of other threads on these connections raise `StoreClosedError`."""
        system.process_epoch()  # in the child of a fork by C code, this abandons the parent's connections
        self.is_closed = True
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.interrupt()
        for pool in self._pools:
            pool.close()

    def after_fork(self) -> None:
        """Abandon the inherited connections in a forked child.

        If two processes used one connection, a process could read the answers to requests of the other process. urllib3
        locks the queue of a pool when it destroys the pool. A thread of the parent may have held this lock during the
        fork. So the queue is initialized again in place.
        """
        for pool in self._pools:
            if pool.pool is not None:
                pool.pool.__init__(pool.pool.maxsize)
        self._connect()

    def _connect(self) -> None:
        """Create the pools of connections. A pool connects at its first request."""
        access = self.access
        self._lock = system.mutex()
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
        """Ask one member after the other. Return the first answer. If no member answers, return the last failure."""
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
            headers["Grpc-Metadata-hasleader"] = "true"  # so a member that is cut off from the others ends the watch
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
            is_cut_off = "EOF" in message or "reset" in message  # a TLS error that only means a lost connection
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
    """Reads the answers of a watch one after the other, from one connection."""

    def __init__(self, response: Any, failures: Any) -> None:
        self._response = response
        self._failures = failures
        self._chunks = response.stream(1 << 16)
        self._rest = b""

    def next(self, limit: float) -> dict[str, Any] | None:
        """Return the next answer, or None if no answer comes within `limit` seconds or the connection is lost."""
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
        """Make a call of `next` in another thread return."""
        try:
            self._response.shutdown()
        except (OSError, ValueError, RuntimeError) as error:  # it is closed already
            raise_if_foreign(error, "urllib3")

    def close(self) -> None:
        """Close the connection. The server then ends the watch."""
        self._response.close()


_all = system.reset_in_child("etcd connections", Client.after_fork)


def _timeout(limit: float) -> float | None:
    """Convert `limit` to a timeout of urllib3: a positive number, or None for no limit."""
    return None if limit > system.threading.TIMEOUT_MAX else max(limit, 0.001)


def _innermost_message(error: BaseException) -> str:
    """Return the message of the innermost exception that `error` wraps."""
    inner: Any = error
    while isinstance(inner, Exception) and inner.args and isinstance(inner.args[-1], Exception):
        inner = inner.args[-1]
    message = str(inner.strerror or inner) if isinstance(inner, OSError) else str(inner)
    return message.rpartition(": ")[2].rstrip(".") if "HTTP" in message else message or type(inner).__name__
