"""What an `~fscoord.EtcdStore` keeps where, and its requests in the form that etcd's JSON gateway takes.

The form is that of ``rpc.proto`` (https://etcd.io/docs/v3.5/learning/api/): bytes in base64, 64-bit numbers as text,
and what is zero left out. Pure: no network, no clock.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

__all__ = [
    "GROUP",
    "OPERATIONS_MAX",
    "Names",
    "Request",
    "after_prefix",
    "compare",
    "decoded",
    "delete",
    "found",
    "grouped",
    "put",
    "range_of",
    "revision_of",
    "text",
    "ungrouped",
    "watch",
]

Request = dict[str, Any]

GROUP: Final = 64
"""How many operations are put into one inner transaction; a server takes 128 on the way down, all levels added up."""

OPERATIONS_MAX: Final = GROUP * GROUP
"""The most operations that fit into one transaction, in groups, unless the server was told another number."""


class Names:
    """Where the store with `prefix` keeps what it has.

    Every name begins with the prefix and an equals sign, and no part of a prefix may, so that no store is found inside
    of another. A queue's name says how long its key is, so that no queue is found inside of another.
    """

    def __init__(self, prefix: bytes) -> None:
        self.values = prefix + b"=v/"
        self.queues = prefix + b"=q/"
        self.members = prefix + b"=m/"
        self.lives = prefix + b"=l/"
        self.counter = prefix + b"=n"

    def value(self, key: bytes) -> bytes:
        """Return where the value of `key` is."""
        return self.values + key

    def queue(self, key: bytes) -> bytes:
        """Return what the names of all values in queue `key` begin with."""
        return b"%s%d/%s/" % (self.queues, len(key), key)

    def member(self, number: int) -> bytes:
        """Return where session `number` says who it is."""
        return b"%s%010d" % (self.members, number)

    def life(self, number: int) -> bytes:
        """Return what is there as long as session `number` lives."""
        return b"%s%010d" % (self.lives, number)


def after_prefix(prefix: bytes) -> bytes:
    """Return the first key behind all that begin with `prefix`, which must hold something else than 0xff."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1])


def text(data: bytes) -> str:
    """Return `data` as it stands in a request."""
    return b2a_base64(data, newline=False).decode("ascii")


def decoded(data: str | None) -> bytes:
    """Return the bytes that stand in a reply as `data`."""
    return a2b_base64(data) if data else b""


def put(key: bytes, value: bytes, lease: int = 0) -> Request:
    """Return the operation that gives `key` the value `value`, until `lease` ends if there is one."""
    operation = {"key": text(key), "value": text(value)}
    return {"request_put": {**operation, "lease": str(lease)} if lease else operation}


def range_of(key: bytes, end: bytes | None = None, **options: Any) -> Request:
    """Return the operation that reads `key`, or all from `key` to before `end`, with the `options` of RangeRequest."""
    bounds = {"key": text(key)} if end is None else {"key": text(key), "range_end": text(end)}
    return {"request_range": {**bounds, **options}}


def delete(key: bytes, end: bytes | None = None, **options: Any) -> Request:
    """Return the operation that deletes `key`, or all from `key` to before `end`."""
    return {"request_delete_range": range_of(key, end, **options)["request_range"]}


def compare(key: bytes, what: str, value: int, result: str = "EQUAL") -> Request:
    """Return the condition that a number of `key`, its ``create`` or ``mod`` revision, is `value`; 0: it is missing."""
    return {"key": text(key), "target": what.upper(), "result": result, f"{what}_revision": str(value)}


def grouped(operations: Sequence[Request]) -> list[Request]:
    """Return `operations` as a transaction takes them: a server refuses more than 128 that stand side by side, but each
    may be a transaction of its own, and all take effect at once.
    """
    if len(operations) <= GROUP:
        return list(operations)
    groups = [operations[start : start + GROUP] for start in range(0, len(operations), GROUP)]
    return [{"request_txn": {"success": list(group)}} for group in groups]


def ungrouped(responses: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the answer to each single operation, in order."""
    flat: list[dict[str, Any]] = []
    for response in responses:
        for kind, answer in response.items():
            if kind == "response_txn":
                flat += ungrouped(answer.get("responses", ()))
            else:
                flat.append(answer or {})
    return flat


def found(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the keys and values that a range, or a deletion that tells what was there, has found."""
    return list(answer.get("kvs") or answer.get("prev_kvs") or ())


def revision_of(reply: Mapping[str, Any]) -> int:
    """Return the revision of the whole store at which this reply was true."""
    return int(reply["header"]["revision"])


def watch(key: bytes, end: bytes | None, revision: int, ignored: str) -> Request:
    """Return the request to be told what happens from `revision` on.

    Args:
        key: what is watched, or where that begins.
        end: before what it ends, or None.
        revision: the first of interest; it may have passed.
        ignored: ``"NOPUT"``, ``"NODELETE"`` or nothing.
    """
    bounds = range_of(key, end)["request_range"]
    return {"create_request": {**bounds, "start_revision": str(revision), "filters": [ignored] if ignored else []}}
