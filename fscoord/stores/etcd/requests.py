"""`KeySpace`, the keys that an `~fscoord.EtcdStore` uses, and functions that make requests for etcd's JSON gateway.

The requests have the form of ``rpc.proto`` (https://etcd.io/docs/v3.5/learning/api/): bytes are in base64, 64-bit
integers are text, and zero values are left out. The module is pure: it uses no network and no clock.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

Request = dict[str, Any]

GROUP: Final = 64
"""The most operations in one inner transaction. A server takes 128 operations, counted over all levels of nesting on
the path to an operation."""

OPERATIONS_MAX: Final = GROUP * GROUP
"""The most operations in one transaction, which has up to `GROUP` inner transactions, at the server's default limit."""


class KeySpace:
    """The etcd keys of the store with `prefix`.

    Every key begins with the prefix and an equals sign. No part of a prefix may begin with an equals sign, so no key of
    one store is also a key of another store. A queue's prefix contains the length of the queue's name, so no key of one
    queue is also a key of another queue.

    Attributes:
        values: the prefix of all values.
        queues: the prefix of all queues.
        members: the prefix of all session records.
        lives: the prefix of the lease keys, one for each session. etcd deletes the key when the session's lease
            expires.
        waits: the prefix of the shown waits, one key for each session that waits for long.
        counter: the key with the number of the last session.
    """

    def __init__(self, prefix: bytes) -> None:
        self.values = prefix + b"=v/"
        self.queues = prefix + b"=q/"
        self.members = prefix + b"=m/"
        self.lives = prefix + b"=l/"
        self.waits = prefix + b"=w/"
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

    def wait(self, number: int) -> bytes:
        """Return the key of the shown wait of session `number`."""
        return b"%s%010d" % (self.waits, number)


def after_prefix(prefix: bytes) -> bytes:
    """Return the first key after all keys that begin with `prefix`. The prefix must have a byte other than 0xff."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1])


def b64(data: bytes) -> str:
    """Return `data` in base64, as a request contains it."""
    return b2a_base64(data, newline=False).decode("ascii")


def unb64(data: str | None) -> bytes:
    """Return the bytes of `data`, the base64 text of a reply. None stands for no bytes."""
    return a2b_base64(data) if data else b""


def put(key: bytes, value: bytes, lease: int = 0) -> Request:
    """Return the operation that sets `key` to `value`. If `lease` is not 0, the key is deleted when the lease ends."""
    operation = {"key": b64(key), "value": b64(value)}
    return {"request_put": {**operation, "lease": str(lease)} if lease else operation}


def range_of(key: bytes, end: bytes | None = None, **options: Any) -> Request:
    """Return the operation that reads `key`, or all keys from `key` to before `end`.

    Args:
        key: the key, or the first key of the range.
        end: the first key after the range.
        options: further fields of a RangeRequest.
    """
    bounds = {"key": b64(key)} if end is None else {"key": b64(key), "range_end": b64(end)}
    return {"request_range": {**bounds, **options}}


def delete(key: bytes, end: bytes | None = None, **options: Any) -> Request:
    """Return the operation that deletes `key`, or all keys from `key` to before `end`."""
    return {"request_delete_range": range_of(key, end, **options)["request_range"]}


def compare(key: bytes, what: str, value: int | bytes, result: str = "EQUAL") -> Request:
    """Return the condition that a revision of `key`, or its value, is `value`.

    Args:
        key: the key.
        what: ``"create"`` or ``"mod"``, the kind of the revision; or ``"value"``, which never holds for a missing key.
        value: the revision, where 0 means that the key is missing; or the value.
        result: the result of the comparison for which the condition holds.
    """
    if isinstance(value, bytes):
        return {"key": b64(key), "target": "VALUE", "result": result, "value": b64(value)}
    return {"key": b64(key), "target": what.upper(), "result": result, f"{what}_revision": str(value)}


def nest_operations(operations: Sequence[Request]) -> list[Request]:
    """Return `operations` as inner transactions with up to `GROUP` operations each.

    A server refuses more than 128 operations on one level. Inner transactions take effect together with the outer
    transaction.
    """
    if len(operations) <= GROUP:
        return list(operations)
    groups = [operations[start : start + GROUP] for start in range(0, len(operations), GROUP)]
    return [{"request_txn": {"success": list(group)}} for group in groups]


def flatten_responses(responses: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the answer to each operation of a transaction, in order, without the nesting of `nest_operations`."""
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
    """Return the revision of etcd at which `reply` was made."""
    return int(reply["header"]["revision"])
