r"""Text from other processes in messages: `printable` for people, `shell_word` for shells, `escape_word` for keys.

Names of files and keys may have any bytes. As text they have a lone surrogate for each byte that is not UTF-8
(`os.fsdecode`). To people each such byte is shown as ``\xNN``. The module is pure: it makes no system calls.
"""

from __future__ import annotations

import re
from functools import lru_cache

_BYTE_IN_REPR = re.compile(r"(?<!\\)((?:\\\\)*)\\udc([89a-f][0-9a-f])")
"""A byte that is not UTF-8 in a name that `repr` has quoted. `repr` doubles the backslashes of the name itself."""


def printable(data: str | bytes) -> str:
    r"""Return `data` as text without characters that can't be printed. A byte that is not UTF-8 becomes ``\xNN``.

    A ``str`` may be a message with names that `repr` has quoted. `repr` shows such a byte as ``\udcNN``, which becomes
    ``\xNN``, too.
    """
    text = data.decode("utf-8", "surrogateescape") if isinstance(data, bytes) else data
    if not text.isprintable():
        text = "".join(sign if sign.isprintable() else _escape(sign) for sign in text)
    if isinstance(data, str) and "\\udc" in text:
        text = _BYTE_IN_REPR.sub(r"\1\\x\2", text)
    return text


def _escape(sign: str) -> str:
    return f"\\x{ord(sign) - 0xDC00:02x}" if "\udc80" <= sign <= "\udcff" else ascii(sign)[1:-1]


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-")
"""The characters that mean themselves to every shell."""


@lru_cache(maxsize=16)
def escape_word(text: str) -> str:
    """Return `text` as a word of printable characters without spaces. Different texts become different words.

    Printable characters of all alphabets stay as they are, except the space and ``%``. Every byte of any other
    character becomes ``%XX``, as in a URL. A lone surrogate stands for a byte that is not UTF-8 (`os.fsdecode`).
    """
    return "".join(
        sign if sign.isprintable() and sign not in " %" else "".join(f"%{byte:02X}" for byte in _bytes(sign))
        for sign in text
    )


def closer_look(path: str) -> str:
    """Return the end of the message of a time-out on the log at `path`: the command that shows all waits."""
    return f"; to look closer, run fscoord ps {shell_word(path)}"


def shell_word(text: str) -> str:
    r"""Return `text` as one printable word of a shell, as `shlex.quote` does.

    A text that can't be printed, such as a path that is not UTF-8, is quoted as ``$'...'``, which all shells but the
    smallest know. Nothing is imported for it: a time-out may be raised in a forked child that can import nothing any
    more.
    """
    if text and _PLAIN.issuperset(text):
        return text
    if text.isprintable():
        return "'" + text.replace("'", "'\"'\"'") + "'"
    return "$'" + "".join(_in_dollar_quotes(sign) for sign in text) + "'"


def _in_dollar_quotes(sign: str) -> str:
    if sign in "\\'":
        return f"\\{sign}"
    return sign if sign.isprintable() else "".join(f"\\x{byte:02x}" for byte in _bytes(sign))


def _bytes(sign: str) -> bytes:
    return sign.encode("utf-8", "surrogateescape" if "\udc80" <= sign <= "\udcff" else "surrogatepass")
