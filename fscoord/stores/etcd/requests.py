"""`KeySpace`, the keys that an `~fscoord.EtcdStore` uses, and requests in the form that etcd's JSON gateway takes.

The form is that of ``rpc.proto`` (https://etcd.io/docs/v3.5/learning/api/): bytes in base64, 64-bit integers as text,
zero values left out. Pure: no network, no clock.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

__all__ = [
    "GROUP",
    "OPERATIONS_MAX",
    "KeySpace",
    "Request",
    "after_prefix",
    "b64",
    "compare",
    "delete",
    "flatten_responses",
    "key_values",
    "nest_operations",
    "put",
    "range_of",
    "revision_of",
    "unb64",
    "watch",
]

Request = dict[str, Any]

GROUP: Final = 64
"""Operations per inner transaction. A server takes 128, summed over all levels on the way down to an operation."""

OPERATIONS_MAX: Final = GROUP * GROUP
"""The most operations in one transaction of groups, at the server's default limit."""


class KeySpace:
    """The etcd keys of the store with `prefix`.

    Every key begins with the prefix and an equals sign. No part of a prefix may begin with one, so one store's keys
    never lie inside another store. A queue's prefix contains the length of the queue's name, so one queue's keys never
    lie inside another queue.

    Attributes:
        values: the prefix of all values.
        queues: the prefix of all queues.
        members: the prefix of all session records.
        lives: the prefix of the keys that etcd deletes when a session's lease expires.
        counter: the key with the number of the last session.
    """

    def __init__(self, prefix: bytes) -> None:
        self.values = prefix + b"=v/"
        self.queues = prefix + b"=q/"
        self.members = prefix + b"=m/"
        self.lives = prefix + b"=l/"
        self.counter = prefix + b"=n"

    def value(self, key: bytes) -> bytes:
        """Return the key of the value of `key`."""
        return self.values + key

    def queue(self, key: bytes) -> bytes:
        """Return the prefix of all values in queue `key`."""
        return b"%s%d/%s/" % (self.queues, len(key), key)

    def member(self, number: int) -> bytes:
        """Return the key of the record of session `number`."""
        return b"%s%010d" % (self.members, number)

    def life(self, number: int) -> bytes:
        """Return the key that exists as long as session `number` lives."""
        return b"%s%010d" % (self.lives, number)


def after_prefix(prefix: bytes) -> bytes:
    """Return the first key after all keys that begin with `prefix`, which must have a byte other than 0xff."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1])


def b64(data: bytes) -> str:
    """Return `data` as a request contains it."""
    return b2a_base64(data, newline=False).decode("ascii")


def unb64(data: str | None) -> bytes:
    """Return the bytes that a reply contains as `data`."""
    return a2b_base64(data) if data else b""


def put(key: bytes, value: bytes, lease: int = 0) -> Request:
    """Return the operation that sets `key` to `value`, until `lease` ends unless it is 0."""
    operation = {"key": b64(key), "value": b64(value)}
    return {"request_put": {**operation, "lease": str(lease)} if lease else operation}


def range_of(key: bytes, end: bytes | None = None, **options: Any) -> Request:
    """Return the operation that reads `key`, or all keys from `key` to before `end`.

    Args:
        key: the only key, or the first.
        end: the first key after the range.
        options: further fields of a RangeRequest.
    """
    bounds = {"key": b64(key)} if end is None else {"key": b64(key), "range_end": b64(end)}
    return {"request_range": {**bounds, **options}}


def delete(key: bytes, end: bytes | None = None, **options: Any) -> Request:
    """Return the operation that deletes `key`, or all keys from `key` to before `end`."""
    return {"request_delete_range": range_of(key, end, **options)["request_range"]}


def compare(key: bytes, what: str, value: int, result: str = "EQUAL") -> Request:
    """Return the condition that the ``create`` or ``mod`` revision of `key` is `value`; 0 means that it is missing."""
    return {"key": b64(key), "target": what.upper(), "result": result, f"{what}_revision": str(value)}


def nest_operations(operations: Sequence[Request]) -> list[Request]:
    """Return `operations` as inner transactions of up to `GROUP` each.

    A server refuses more than 128 operations on one level. Inner transactions take effect together with the outer one.
    """
    if len(operations) <= GROUP:
        return list(operations)
    groups = [operations[start : start + GROUP] for start in range(0, len(operations), GROUP)]
    return [{"request_txn": {"success": list(group)}} for group in groups]


def flatten_responses(responses: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the answer to each operation of a transaction, in order, without the levels of `nest_operations`."""
    flat: list[dict[str, Any]] = []
    for response in responses:
        for kind, answer in response.items():
            if kind == "response_txn":
                flat += flatten_responses(answer.get("responses", ()))
            else:
                flat.append(answer or {})
    return flat


def key_values(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the keys and values that a range found, or that a deletion with ``prev_kv`` deleted."""
    return list(answer.get("kvs") or answer.get("prev_kvs") or ())


def revision_of(reply: Mapping[str, Any]) -> int:
    """Return the revision of the whole etcd store at which `reply` was true."""
    return int(reply["header"]["revision"])


def watch(key: bytes, end: bytes | None, revision: int, ignored: str) -> Request:
    """Return the request for a watch.

    Args:
        key: the only watched key, or the first.
        end: the first key after the watched range, or None.
        revision: the first revision whose events are sent; it may be in the past.
        ignored: ``"NOPUT"``, ``"NODELETE"``, or empty.
    """
    bounds = range_of(key, end)["request_range"]
    return {"create_request": {**bounds, "start_revision": str(revision), "filters": [ignored] if ignored else []}}
