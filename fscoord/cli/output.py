"""Writes results to standard output as bytes, text or JSON, and the progress of slow verbs to standard error."""

from __future__ import annotations

import base64
import json
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from fscoord._runtime import system
from fscoord._runtime.escaping import printable
from fscoord.cli.exit_codes import OutputError
from fscoord.errors import FscoordError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar, TaskID

Timer = system.threading.Timer

NOTE_AFTER_S = 1.0
"""How many seconds a wait lasts before the verb prints a line about it."""

Document = Mapping[str, Any] | list[dict[str, Any]]


def write(data: bytes) -> None:
    """Write `data` to standard output, byte for byte."""
    if sys.stdout is None:
        raise OutputError("standard output is closed")
    try:
        sys.stdout.buffer.write(data)
    except OSError as error:
        raise OutputError(f"standard output: {error.strerror}") from error


def write_value(data: bytes) -> None:
    """Write a value byte for byte; on a terminal, end its last line."""
    write(data + b"\n" if is_terminal() and not data.endswith(b"\n") else data)


def write_json(document: Document) -> None:
    """Write `document` as one line of JSON, in ASCII.

    A field whose bytes or text are not UTF-8 is written in Base64, under the name ``NAME_base64``. If one item of a
    list is not UTF-8, all items are written in Base64.
    """
    write(json.dumps(_encodable(document)).encode("ascii") + b"\n")


def _encodable(value: Any) -> Any:
    """Return `value` in the form that JSON can express."""
    if isinstance(value, Mapping):
        return dict(_field(name, each) for name, each in value.items())
    return list(map(_encodable, value)) if isinstance(value, (list, tuple)) else value


def _field(name: str, value: Any) -> tuple[str, Any]:
    if isinstance(value, (bytes, str)):
        text = _text(value)
        return (name, text) if text is not None else (f"{name}_base64", _base64(value))
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, (bytes, str)) for each in value):
        texts = list(map(_text, value))
        return (f"{name}_base64", list(map(_base64, value))) if None in texts else (name, texts)
    return name, _encodable(value)


def _text(data: bytes | str) -> str | None:
    """Return `data` as text, or None if `data` is not UTF-8."""
    try:
        if isinstance(data, bytes):
            return data.decode()
        data.encode()
    except UnicodeError:
        return None
    return data


def _base64(data: bytes | str) -> str:
    return base64.b64encode(data if isinstance(data, bytes) else _raw(data)).decode("ascii")


def _raw(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # the text comes from another program's document, not from a file name or key
        return text.encode("utf-8", "surrogatepass")


def show(as_json: bool, document: Document, lines: Iterable[str]) -> None:
    """Write `document` as JSON if `as_json` is true. Otherwise write `lines`, and a newline after each."""
    if as_json:
        write_json(document)
    else:
        write_lines(lines)


def write_lines(lines: Iterable[str]) -> None:
    """Write `lines` to standard output, and a newline after each. Control characters are escaped."""
    write("".join(f"{printable(line)}\n" for line in lines).encode())


def tell(log: logging.Logger, words: str) -> None:
    """Log `words` if -v was given. Otherwise print them if standard error is a terminal."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", words)
    elif _is_watched():
        say(words)


@contextmanager
def telling_if_slow(
    log: logging.Logger, words: str, more: Callable[[], str] | None = None
) -> Iterator[Callable[[], None]]:
    """Log `words`. If the body of the ``with`` takes longer than `NOTE_AFTER_S` seconds, print a note on the terminal.

    With -v, the note goes to the log and not to the terminal. With -v and without `more` there is no note, because it
    would repeat `words`. The ``with`` yields a function. A call of this function prevents the note.

    Args:
        log: the logger of the verb.
        words: the purpose and the limit of the wait.
        more: returns the reason of the wait, such as the holders of a lock, or an empty text. This function may use the
            store.
    """
    is_over = False

    def end() -> None:
        nonlocal is_over
        is_over = True

    def note() -> None:
        reason = ""
        if more is not None:
            with suppress(FscoordError):  # the wait itself raises the error
                reason = more()
        if not is_over:
            tell(log, f"{words}; {reason}" if reason else words)

    log.info("%s", words)
    is_due = more is not None if log.isEnabledFor(logging.INFO) else _is_watched()
    timer = Timer(NOTE_AFTER_S, note) if is_due else None
    if timer is not None:
        timer.daemon = True
        with suppress(RuntimeError):  # no thread can be started: the wait goes on without a note
            timer.start()
    try:
        yield end
    finally:
        end()
        if timer is not None:
            timer.cancel()


def _is_watched() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def flush() -> None:
    """Flush standard output now, so that an error is raised while the command can still report it."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        raise OutputError(f"standard output: {error.strerror}") from error


def detach_stdout() -> None:
    """Replace standard output by /dev/null, so that the interpreter's flush at exit can't fail and print an error."""
    if sys.stdout is not None:
        _detach(sys.stdout)


def say(words: str) -> None:
    """Print `words` on standard error as one line that begins with "fscoord:". Control characters are escaped."""
    write_error(f"fscoord: {printable(words)}\n")


def write_error(text: str) -> None:
    """Write `text` to standard error. Ignore a failed write, because the exit code also shows the error."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _detach(sys.stderr)


def _detach(stream: TextIO) -> None:
    nowhere = system.os.open(system.os.devnull, system.os.O_WRONLY)
    system.os.dup2(nowhere, stream.fileno())
    system.os.close(nowhere)


def is_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def can_redraw() -> bool:
    """Return whether standard output is a terminal that can move its cursor, as a live screen needs."""
    return is_terminal() and system.os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def counted(number: int, what: str) -> str:
    """Return `number` and the noun `what`, in the plural unless `number` is 1."""
    ending = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number} {what}{ending}"


def size_text(count: float) -> str:
    """Return a size of `count` bytes with three digits and a unit, such as 1.25 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def utc_text(seconds: float, form: str) -> str:
    """Return the time `seconds` since the epoch in UTC, in the format `form` of strftime(3)."""
    try:
        return system.time.strftime(form, system.time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # another process's clock may have been set to anything
        return f"{seconds:g}"


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str] = ()) -> list[str]:
    """Return the lines of a table with headings. The columns whose headings are in `numbers` are flush right.

    Control characters in a cell are escaped.
    """
    table = [tuple(headings), *(tuple(map(printable, row)) for row in rows)]
    widths = [max(map(_columns, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        padded = []
        for heading, cell, width in zip(headings, row, widths, strict=True):
            space = " " * (width - _columns(cell))
            padded.append(space + cell if heading in numbers else cell + space)
        lines.append("  ".join(padded).rstrip())
    return lines


def _columns(text: str) -> int:
    """Return how many columns of a terminal `text` takes: two for a wide character, none for a combining character."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(sign) else 2 if east_asian_width(sign) in "WF" else 1 for sign in text)


BEGIN_S = 1.0
"""How many seconds pass before a bar is shown. A verb that ends earlier does not import rich."""


class Progress:
    """A progress bar for the bytes of one file after another. The end of the ``with`` erases it."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._is_shown = _is_watched()
        self._begin = system.time.monotonic() + BEGIN_S
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def report(self, file: str, done: int, size: int) -> None:
        """Show that `done` of the `size` bytes of `file` have been processed."""
        if not self._is_shown or (self._bar is None and system.time.monotonic() < self._begin):
            return
        if self._bar is None or self._task is None:
            self._bar = _make_bar()
            self._task = self._bar.add_task("")
            self._bar.start()
        name = printable(system.os.path.basename(file))
        self._bar.update(self._task, description=f"{self._doing} {name}", completed=done, total=size)


def _make_bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress as Bar, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Bar(*columns, console=Console(stderr=True), transient=True)
