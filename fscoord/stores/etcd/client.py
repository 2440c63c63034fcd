"""`Cluster`: one process's connections to the members of an etcd cluster, and which of them answers.

The client is urllib3, which etcd3gw stands on: that one knows one address only, tells of no revision from which to
watch, ends no watch, and takes twice as long for a request (``benchmarks etcd``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakSet

from fscoord._runtime import system
from fscoord.errors import (
    FscoordError,
    LimitExceededError,
    StoreClosedError,
    StoreError,
    StoreUnavailableError,
    missing_extra,
)
from fscoord.stores.etcd.address import Access
from fscoord.stores.etcd.requests import Request
from fscoord.stores.etcd.stream import Stream

__all__ = ["Cluster", "CompactedError"]

CONNECTIONS: Final = 64
"""How many idle connections to one member are kept: one for each thread that is in a call."""

BODY_MAX: Final = 16 << 20
"""The most that is sent: etcd's manual warns of requests over 10 MiB, and base64 makes four bytes of three."""

FIRST_PAUSE_S: Final = 0.01
LONGEST_PAUSE_S: Final = 0.5

LEAST_CONNECT_S: Final = 0.2
LEAST_ANSWER_S: Final = 1.0
"""How long a member has for its answer to who reads, however short the wait, if there is another one to ask."""

SILENCE_S: Final = 5.0
"""How long a member may say nothing to who reads, before another member is asked. And how long it has for its answer,
however short the wait, if no other can give it: it must sync its disk before some, which took over a second where other
programs wrote, too.
"""

# gRPC's numbers (https://grpc.io/docs/guides/status-codes/) for what was refused and so has had no effect.
INVALID, NOT_FOUND, DENIED, EXHAUSTED, PRECONDITION, OUT_OF_RANGE, UNAUTHENTICATED = 3, 5, 7, 8, 9, 11, 16


class CompactedError(FscoordError):
    """The server has forgotten the revision that was asked for: read again."""


class _NotSent(Exception):
    """There was no connection: whatever was asked for has had no effect."""


class _Unanswered(Exception):
    """There was a connection, and no answer on it: nobody knows whether it has had its effect."""


class _Unauthenticated(Exception):
    """The token is not valid any more."""


class Cluster:
    """The members of a cluster; the one that answered last is asked first."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._urllib3 = _urllib3()
        self._failures = self._urllib3.exceptions
        self._is_closed = False
        self._connect()
        _all.add(self)

    def __str__(self) -> str:
        return str(self.access)

    def call(self, path: str, body: Request, limit: float, *, writes: bool = False) -> dict[str, Any]:
        """Return the answer to the request `body`.

        What reads is asked for again, of each member in turn, until it is answered. What writes is asked for again only
        while it can't have had an effect.

        Raises:
            StoreUnavailableError: there was no answer within `limit` seconds, or the server refuses.
            LimitExceededError: the server takes nothing so large.
            CompactedError: the revision asked for is gone.
        """
        data = json.dumps(body).encode()
        if len(data) > BODY_MAX:
            raise self._too_large(f"{len(data)} bytes are over what a server of etcd takes at all")
        ends = system.time.monotonic() + limit
        pause = FIRST_PAUSE_S
        while True:
            failure = self._ask_each(path, data, ends, writes)
            if isinstance(failure, dict):
                return failure
            left = ends - system.time.monotonic()
            if left <= 0:
                raise StoreUnavailableError(
                    f"timeout: {self}: no answer within {limit:.3g} s ({failure}); see that etcd runs there, and that"
                    " the port is open"
                ) from failure.__cause__
            system.time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def open_stream(self, path: str, bodies: Sequence[Request], limit: float) -> Stream | None:
        """Return the stream of answers to `bodies`, or None if there is no connection, or no answer in `limit` seconds.

        Whoever is given one closes it.
        """
        data = "\n".join(map(json.dumps, bodies)).encode()
        try:
            response = self._post(self._first, path, data, limit, limit, streams=True)
        except (_NotSent, _Unanswered):
            return None
        if response.status != 200:  # why, the next request will say
            response.close()
            return None
        stream = Stream(response, self._failures)
        with self._lock:
            self._streams.add(stream)
        if self._is_closed:
            stream.interrupt()
        return stream

    def close_stream(self, stream: Stream) -> None:
        """Give the connection of `stream` back."""
        with self._lock:
            self._streams.discard(stream)
        stream.close()
        self.refuse_if_closed()

    def refuse_if_closed(self) -> None:
        """Raise `StoreClosedError` after `close`."""
        if self._is_closed:
            raise StoreClosedError(f"{self}: this handle was closed; open the store again")

    def close(self) -> None:
        """Give all connections back; whoever waits on one gets a `StoreClosedError`."""
        system.process_epoch()  # after a fork in C it makes the child leave its parent's connections alone
        self._is_closed = True
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.interrupt()
        for pool in self._pools:
            pool.close()

    def after_fork(self) -> None:
        """In a forked child: begin without connections, for on the parent's two processes would mix their answers.

        urllib3 empties the queue of each pool that is thrown away, or at the end of the process, and a thread of the
        parent may have that queue's lock. So the queue is made anew where it is.
        """
        for pool in self._pools:
            if pool.pool is not None:
                pool.pool.__init__(pool.pool.maxsize)
        self._connect()

    def _connect(self) -> None:
        """Make what keeps connections; none is made yet."""
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
        """Return the answer of the first member that has one, or why the last had none."""
        failure: Exception = _NotSent("nobody was asked")
        for turn in range(len(self._pools)):
            index = (self._first + turn) % len(self._pools)
            left = ends - system.time.monotonic()
            others = len(self._pools) - turn - 1
            patience = min(left / (others + 1), SILENCE_S) if others else left
            answer = max(left, SILENCE_S) if writes or not others else max(patience, LEAST_ANSWER_S)
            try:
                reply = self._answer(index, path, data, max(patience, LEAST_CONNECT_S), answer)
            except _NotSent as error:
                failure = error
            except _Unanswered as error:
                failure = error
                if writes:
                    raise StoreUnavailableError(
                        f"{self}: {error}; nobody knows whether this write has had its effect", maybe_applied=True
                    ) from error.__cause__
            else:
                self._first = index
                return reply
            if system.time.monotonic() >= ends:
                break
        return failure

    def _answer(self, index: int, path: str, data: bytes, connect: float, read: float) -> dict[str, Any]:
        try:
            return self._parsed(self._post(index, path, data, connect, read), index)
        except _Unauthenticated:  # the token has run out, or somebody changed who may do what
            self._token = None
        try:
            return self._parsed(self._post(index, path, data, connect, read), index)
        except _Unauthenticated as error:
            raise self._denied(str(error)) from None

    def _post(self, index: int, path: str, data: bytes, connect: float, read: float, *, streams: bool = False) -> Any:
        """Return the response of member `index`."""
        self.refuse_if_closed()
        system.process_epoch()
        headers = {"Content-Type": "application/json"}
        if streams:
            headers["Grpc-Metadata-hasleader"] = "true"  # so that a member which lost the others ends the watch
        if self.access.user is not None and path != "auth/authenticate":
            headers["Authorization"] = self._token or self._log_in(index, connect)
        failures = self._failures
        try:
            return self._pools[index].urlopen(
                "POST",
                f"/v3/{path}",
                body=data,
                headers=headers,
                retries=False,
                timeout=self._urllib3.Timeout(connect=_some(connect), read=_some(read)),
                preload_content=not streams,
            )
        except (failures.NewConnectionError, failures.ConnectTimeoutError) as error:
            raise _NotSent(f"{self._named(index)}: {_words(error)}") from error
        except (failures.HTTPError, OSError) as error:
            self.refuse_if_closed()
            words = _words(error)
            if isinstance(error, failures.SSLError) and not _is_cut_off(words):
                raise StoreUnavailableError(
                    f"{self._named(index)}: {words}; see which certificates both sides trust"
                ) from error
            raise _Unanswered(f"{self._named(index)}: {words}") from error

    def _parsed(self, response: Any, index: int) -> dict[str, Any]:
        """Return what the response says, or raise what it means."""
        try:
            reply = json.loads(response.data)
        except ValueError:
            reply = None
        if response.status == 200 and isinstance(reply, dict):
            return reply
        said = f"{self._named(index)}: HTTP {response.status}, {response.data[:200]!r}"
        if not isinstance(reply, dict):
            if response.status >= 500:
                raise _Unanswered(said)
            raise StoreUnavailableError(f"{said}; this is not how etcd 3.4 or newer answers")
        raise self._meaning(int(reply.get("code", 0)), str(reply.get("message") or reply.get("error") or said))

    def _meaning(self, code: int, message: str) -> Exception:
        """Return what an error of etcd means (https://github.com/etcd-io/etcd/, ``rpctypes/error.go``)."""
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
            f"{self}: {message}; nothing was written. A server takes what --max-request-bytes (1.5 MiB) and"
            " --max-txn-ops (128) allow"
        )

    def _denied(self, message: str) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"{self}: {message}; see the user, the password, and the role's rights on the prefix",
            errno=system.errno.EACCES,
        )

    def _log_in(self, index: int, limit: float) -> str:
        """Return a token for the user."""
        body = json.dumps({"name": self.access.user, "password": self.access.password}).encode()
        try:
            reply = self._parsed(self._post(index, "auth/authenticate", body, limit, limit), index)
        except _Unanswered as error:  # what it was for was not sent yet
            raise _NotSent(str(error)) from error
        self._token = token = str(reply["token"])
        return token

    def _named(self, index: int) -> str:
        return str(self.access._replace(endpoints=self.access.endpoints[index : index + 1]))


_all: WeakSet[Cluster] = WeakSet()


def _after_fork_in_child() -> None:
    for cluster in list(_all):
        cluster.after_fork()


system.after_fork_in_child("etcd connections", _after_fork_in_child)


def _some(limit: float) -> float | None:
    """Return `limit` as urllib3 takes a time-out: above zero, and None for none."""
    return None if limit > system.threading.TIMEOUT_MAX else max(limit, 0.001)


def _words(error: BaseException) -> str:
    """Return what the lowest layer said."""
    inner: Any = error
    while isinstance(inner, Exception) and inner.args and isinstance(inner.args[-1], Exception):
        inner = inner.args[-1]
    said = str(inner.strerror or inner) if isinstance(inner, OSError) else str(inner)
    return said.rpartition(": ")[2].rstrip(".") if "HTTP" in said else said or type(inner).__name__


def _is_cut_off(words: str) -> bool:
    """Return whether TLS only says that the other side has gone."""
    return "EOF" in words or "reset" in words


def _urllib3() -> Any:
    try:
        import urllib3
    except ImportError as error:
        raise missing_extra("EtcdStore", "urllib3", "etcd") from error
    return urllib3
