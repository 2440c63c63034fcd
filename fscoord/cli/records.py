"""`RecordWords` describes the records of a log in words, for `fscoord dump`."""

from __future__ import annotations

from typing import Final

from fscoord._arguments import MalformedText, parse_uint63, words_in
from fscoord._log.format.control_records import Failure, decode_death
from fscoord._log.format.record import MalformedRecord, decode_changes
from fscoord._runtime.escaping import printable
from fscoord._waiting.rounds import ARRIVALS, COMPLETE
from fscoord.inspect import Entry
from fscoord.recipes._entry import parse_line
from fscoord.recipes.holdings import LINE

MEMBER: Final = b"/member/"


class RecordWords:
    """Describes records in words. An object keeps the process of each session, so it must get all records in order."""

    def __init__(self) -> None:
        self._owners: dict[int, str] = {}

    def words(self, entry: Entry) -> str | None:
        """Return the meaning of `entry`, or None if its value is shown unchanged."""
        key, value = entry.key, entry.value
        try:
            if entry.kind == "session":
                self._owners[entry.writer] = printable(value).partition(" ")[0]
            elif entry.kind == "death":
                number = decode_death(value)
                return f"session {number} ({self._owners.get(number, 'unknown')}) was found dead"
            elif entry.kind == "failure":
                return _failure(Failure.decode(value))
            elif entry.kind in ("multi_set", "transaction"):
                return ", ".join(_change(name, each) for name, each in decode_changes(value))
            elif entry.kind == "append" and key.endswith(ARRIVALS):
                return ", ".join(map(_arrival, value.split()))
            elif entry.kind == "set" and key.endswith(COMPLETE):
                return "all ranks have arrived"
            elif entry.kind == "set" and MEMBER in key:
                return _participant(value)
            elif entry.kind == "compare_set" and key.endswith(LINE):
                return _line(value)
        except (MalformedText, MalformedRecord):  # another program wrote this value, to a key that looks like ours
            pass
        return None


def _failure(failure: Failure) -> str:
    how = f"left by {failure.reason}" if failure.reason else "was found dead"
    before = ", which ended the run before" if failure.is_previous else ""
    return printable(f"{failure.session.name} {how}{before}")


def _word(key: bytes) -> str:
    return printable(key).replace(" ", "\\x20")


def _change(key: bytes, value: bytes | None) -> str:
    if value is None:
        return f"{_word(key)} deleted"
    return f"{_word(key)}={_line(value) if key.endswith(LINE) else printable(value)}"


def _arrival(token: bytes) -> str:
    """Describe one token of a barrier's arrivals; see `fscoord.collectives.arrivals`."""
    if token.startswith(b"!"):
        ranks = [parse_uint63(rank) for rank in token.partition(b":")[2].split(b",")]
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} found dead: the round is broken"
    rank, slash, size = token.removeprefix(b"-").partition(b"/")
    if not slash:
        raise MalformedText("no arrival")
    does = "timed out" if token.startswith(b"-") else "arrived"
    return f"rank {parse_uint63(rank)} of {parse_uint63(size)} {does}"


def _line(value: bytes) -> str:
    state = parse_line(value)
    holders = [f"{each.owner} (token {each.token})" for each in state.entries if each.token]
    waiters = [each.owner for each in state.entries if not each.token]
    held = f"held by {', '.join(holders)}" if holders else f"free (last token {state.last})"
    return printable(held + (f"; waiting: {', '.join(waiters)}" if waiters else ""))


def _participant(value: bytes) -> str:
    head, _, data = value.partition(b"\n")
    session, owner = words_in(head, " ", 2)
    return printable(f"{owner} (session {parse_uint63(session)})") + (f": {printable(data)}" if data else "")
