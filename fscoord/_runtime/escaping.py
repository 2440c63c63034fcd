"""`escape_word`, which makes one word of a host name for keys and values; `closer_look`, a command for the shell.

The module is pure: it makes no system calls.
"""

from __future__ import annotations

from functools import lru_cache

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
    return f"; to look closer, run fscoord ps {_shell_word(path)}"


def _shell_word(text: str) -> str:
    """Return `text` as one word of a shell, as `shlex.quote` does.

    Nothing is imported for it: a time-out may be raised in a forked child that can import nothing any more.
    """
    if text and _PLAIN.issuperset(text):
        return text
    return "'" + text.replace("'", "'\"'\"'") + "'"


def _bytes(sign: str) -> bytes:
    return sign.encode("utf-8", "surrogateescape" if "\udc80" <= sign <= "\udcff" else "surrogatepass")
