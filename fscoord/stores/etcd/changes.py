"""`EtcdWatch`: the watch of an `~fscoord.EtcdStore`, to which etcd itself reports the changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fscoord._arguments import missing_error
from fscoord._runtime import system
from fscoord._waiting.awaited import CHANGE_OF
from fscoord._waiting.changes import Position, Watch, compacted
from fscoord.stores.etcd.requests import after_prefix, range_of, unb64
from fscoord.stores.etcd.transactions import BROKEN_WATCH_PAUSE_S

if TYPE_CHECKING:
    from fscoord.stores.etcd.client import Client
    from fscoord.stores.etcd.transactions import KeyWatcher


class EtcdWatch(Watch):
    """The watch of the keys that begin with `values` and `prefix` in etcd. `values` is not a part of a store's keys.

    The generation of a position is the revision of etcd. The last change of a revision has the offset 0, the one before
    it -1, and so on. etcd reports all changes of a revision together. `watcher` shows the waits of the store's handle.
    """

    def __init__(
        self, client: Client, watcher: KeyWatcher, values: bytes, prefix: bytes, position: Position, limit: float
    ) -> None:
        super().__init__(prefix, position, limit)
        self._client = client
        self._watcher = watcher
        self._values = values

    def _wait(self, limit: float) -> bool:
        start = now = system.time.monotonic()
        slow_logger = self._new_slow_logger(start)
        try:
            while not self._pending:
                self._client.refuse_if_closed()
                left = max(0.0, limit - (now - start))
                self._read(min(left, self._watcher.show_if_long(slow_logger, CHANGE_OF, [self._prefix])))
                now = system.time.monotonic()
                if not self._pending and now - start >= limit:
                    raise missing_error(self._client, CHANGE_OF, [self._prefix], now - start)
            return True
        finally:
            slow_logger.end()

    def _read(self, limit: float) -> None:
        """Read the answers of one watch of etcd until a change is pending, or for `limit` seconds."""
        ends = system.time.monotonic() + limit
        found, first = self._found, self._values + self._prefix
        bounds = range_of(first, after_prefix(first))["request_range"]
        # If not all changes of a revision were found, etcd reports that revision again.
        request = {**bounds, "start_revision": str(found.generation + (found.offset == 0))}
        stream = self._client.open_stream({"create_request": request}, limit)
        reply: dict[str, Any] | None = None
        try:
            while stream is not None and not self._pending:
                reply = stream.next(ends - system.time.monotonic())
                if reply is None or reply.get("canceled"):
                    break
                self._add_events(reply.get("events", ()), found)
        finally:
            if stream is not None:
                self._client.close_stream(stream)
        if reply is not None and "compact_revision" in reply:
            raise compacted(self._client, found, Position(int(reply["compact_revision"]) - 1, 0))
        if not self._pending:  # the connection may be broken
            system.time.sleep(max(0.0, min(BROKEN_WATCH_PAUSE_S, ends - system.time.monotonic())))

    def _add_events(self, events: Any, found: Position) -> None:
        revisions = [int(event["kv"]["mod_revision"]) for event in events]
        for turn, event in enumerate(events):
            position = Position(revisions[turn], -revisions[turn + 1 :].count(revisions[turn]))
            if position > found:
                value = None if event.get("type") == "DELETE" else unb64(event["kv"].get("value"))
                self._add(unb64(event["kv"]["key"])[len(self._values) :], value, position)
