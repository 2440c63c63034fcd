"""`KeySpace`, the keys that an `~fscoord.EtcdStore` uses, and functions that build requests for etcd's JSON gateway.

The requests have the form of ``rpc.proto`` (https://etcd.io/docs/v3.5/learning/api/): bytes are in base64, 64-bit
integers are text, and zero values are left out. The functions are pure.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

Request = dict[str, Any]

SERVER_MAX: Final = 128
"""A server refuses a transaction if its operations, or its conditions if these are more, and the operations of one
inner transaction are more than this number in sum. This is the default of servers.
"""

GROUP: Final = SERVER_MAX // 2
"""The maximum number of operations in one inner transaction."""

CONDITIONS_MAX: Final = 120
"""The maximum number of conditions of a caller in one transaction. It leaves room below `SERVER_MAX`."""

OPERATIONS_MAX: Final = GROUP * GROUP
"""The maximum number of operations in one transaction, which has up to `GROUP` inner transactions."""


class KeySpace:
    """Maps keys and sessions of the store with `prefix` to keys of etcd.

    Every key of etcd begins with the prefix and an equals sign. Two stores have no key in common, because no part of a
    prefix may begin with an equals sign. Two queues have no key in common, because the prefix of a queue contains the
    length of the queue's name.

    Attributes:
        values: the prefix of all values.
        queues: the prefix of all queues.
        members: the prefix of all session records.
        lives: the prefix of the lease keys, one for each session. When the lease of a session expires, etcd deletes
            the key.
        waits: the prefix of the shown waits, one key for each session with a long wait.
        counter: the key that holds the number of the last session.
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
        """Return the prefix of the values in queue `key`."""
        return b"%s%d/%s/" % (self.queues, len(key), key)

    def member(self, number: int) -> bytes:
        """Return the key of the record of session `number`."""
        return b"%s%010d" % (self.members, number)

    def life(self, number: int) -> bytes:
        """Return the lease key of session `number`, which exists as long as the session lives."""
        return b"%s%010d" % (self.lives, number)

    def wait(self, number: int) -> bytes:
        """Return the key of the shown wait of session `number`."""
        return b"%s%010d" % (self.waits, number)


def after_prefix(prefix: bytes) -> bytes:
    """Return the first key after all keys that begin with `prefix`. At least one byte of `prefix` must not be 0xff."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1])


def b64(data: bytes) -> str:
    """Encode `data` in base64, for a request."""
    return b2a_base64(data, newline=False).decode("ascii")


def unb64(data: str | None) -> bytes:
    """Decode `data`, a base64 text from a reply. A reply leaves out an empty value, so None becomes ``b""``."""
    return a2b_base64(data) if data else b""


def put(key: bytes, value: bytes, lease: int = 0) -> Request:
    """Return the operation that sets `key` to `value`. If `lease` is not 0, the key is deleted when the lease ends."""
    operation = {"key": b64(key), "value": b64(value)}
    return {"request_put": {**operation, "lease": str(lease)} if lease else operation}


def range_of(key: bytes, end: bytes | None = None, **options: Any) -> Request:
    """Return the operation that reads `key`. With `end`, it reads all keys from `key` up to but not including `end`.

    Args:
        key: the key, or the first key of the range.
        end: the first key after the range.
        options: further fields of a RangeRequest.
    """
    bounds = {"key": b64(key)} if end is None else {"key": b64(key), "range_end": b64(end)}
    return {"request_range": {**bounds, **options}}


def delete(key: bytes, end: bytes | None = None, **options: Any) -> Request:
    """Return the operation that deletes `key`, or the range from `key` to `end`; see `range_of`."""
    return {"request_delete_range": range_of(key, end, **options)["request_range"]}


def compare(key: bytes, what: str, value: int | bytes, result: str = "EQUAL") -> Request:
    """Return a condition of a transaction: it compares a revision of `key`, or the value of `key`, with `value`.

    Args:
        key: the key.
        what: ``"create"`` or ``"mod"`` to compare this revision, or ``"value"`` to compare the value. A missing key has
            the revision 0. For a missing key, a condition on the value is false.
        value: the expected revision or value.
        result: the comparison: ``"EQUAL"``, ``"GREATER"``, ``"LESS"`` or ``"NOT_EQUAL"``.
    """
    if isinstance(value, bytes):
        return {"key": b64(key), "target": "VALUE", "result": result, "value": b64(value)}
    return {"key": b64(key), "target": what.upper(), "result": result, f"{what}_revision": str(value)}


def nest_operations(operations: Sequence[Request], conditions: int = 0) -> list[Request]:
    """Split more than `GROUP` operations into inner transactions of up to `GROUP` operations each.

    A transaction with more than `GROUP` `conditions` has smaller inner transactions; see `SERVER_MAX`. Inner
    transactions take effect together with the outer transaction.
    """
    if len(operations) <= GROUP:
        return list(operations)
    size = min(GROUP, SERVER_MAX - conditions)
    groups = [operations[start : start + size] for start in range(0, len(operations), size)]
    return [{"request_txn": {"success": list(group)}} for group in groups]


def flatten_responses(responses: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers to the operations of a transaction, in order. This reverses `nest_operations`."""
    flat: list[dict[str, Any]] = []
    for response in responses:
        for kind, answer in response.items():
            if kind == "response_txn":
                flat += flatten_responses(answer.get("responses", ()))
            else:
                flat.append(answer or {})
    return flat


def key_values(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the keys and values from the answer to a read, or to a deletion with ``prev_kv``."""
    return list(answer.get("kvs") or answer.get("prev_kvs") or ())


def revision_of(reply: Mapping[str, Any]) -> int:
    """Return the revision of etcd in the header of `reply`."""
    return int(reply["header"]["revision"])
