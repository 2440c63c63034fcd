"""`EtcdChanges`: the changes of the keys of an `~fscoord.EtcdStore`, which etcd itself reports to a watch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fscoord._arguments import missing_error
from fscoord._runtime import system
from fscoord._waiting.changes import CHANGE_OF, Changes, Position, compacted
from fscoord.stores.etcd.requests import KeySpace, after_prefix, range_of, unb64
from fscoord.stores.etcd.transactions import BROKEN_WATCH_PAUSE_S, WATCH_MAX_S

if TYPE_CHECKING:
    from fscoord.stores.etcd.client import Client


class EtcdChanges(Changes):
    """The changes of the keys that begin with `prefix`, after `position`.

    The generation of a position is the revision of etcd. The last change of a revision has the offset 0, the one before
    it -1, and so on. etcd reports all changes of a revision together.
    """

    def __init__(self, client: Client, keys: KeySpace, prefix: bytes, position: Position) -> None:
        super().__init__(prefix, position)
        self._client = client
        self._keys = keys

    def wait(self, limit: float) -> bool:
        start = system.time.monotonic()
        left = limit
        while not self.pending:
            self._client.refuse_if_closed()
            is_broken = self._watch(min(max(left, 0.0), WATCH_MAX_S))
            waited = system.time.monotonic() - start
            left = limit - waited
            if not self.pending and left <= 0:
                raise missing_error(self._client, CHANGE_OF, [self.prefix], waited)
            if is_broken:
                system.time.sleep(min(BROKEN_WATCH_PAUSE_S, max(left, 0.0)))
        return True

    def _watch(self, limit: float) -> bool:
        """Read answers of one watch until a change is pending or `limit` seconds are over. Return whether none came."""
        ends = system.time.monotonic() + limit
        found, first = self.found, self._keys.value(self.prefix)
        bounds = range_of(first, after_prefix(first))["request_range"]
        # If not all changes of a revision were found, etcd reports that revision again.
        request = {**bounds, "start_revision": str(found.generation + (found.offset == 0))}
        stream = self._client.open_stream({"create_request": request}, limit)
        is_broken = True
        try:
            while stream is not None and not self.pending:
                reply = stream.next(ends - system.time.monotonic())
                if reply is None:
                    break
                is_broken = False
                if reply.get("canceled"):
                    if "compact_revision" in reply:
                        raise compacted(self._client, found, Position(int(reply["compact_revision"]) - 1, 0))
                    return True
                self._add(reply.get("events", ()), found)
        finally:
            if stream is not None:
                self._client.close_stream(stream)
        return is_broken

    def _add(self, events: Any, found: Position) -> None:
        revisions = [int(event["kv"]["mod_revision"]) for event in events]
        cut = len(self._keys.values)
        for turn, (event, revision) in enumerate(zip(events, revisions, strict=True), 1):
            position = Position(revision, -revisions[turn:].count(revision))
            if position > found:
                value = None if event.get("type") == "DELETE" else unb64(event["kv"].get("value"))
                self.add(unb64(event["kv"]["key"])[cut:], value, position)
