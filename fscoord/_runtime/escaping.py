r"""Escapes text from other processes: `printable` for people, `shell_word` for shells, `escape_word` for keys.

`encodable` is for messages of exceptions, which a program may print or write to a file.

Names of files and keys may have any bytes. In a ``str``, a byte that is not UTF-8 is a lone surrogate (`os.fsdecode`).
Messages show this byte as ``\xNN``. The functions are pure.
"""

from __future__ import annotations

import re
from functools import lru_cache

_BYTE_IN_REPR = re.compile(r"(?<!\\)((?:\\\\)*)\\udc([89a-f][0-9a-f])")
r"""Matches a byte that is not UTF-8 in the result of `repr`. `repr` has doubled each backslash of the original text."""


def printable(data: str | bytes) -> str:
    r"""Return `data` as text in which unprintable characters are escaped. A byte that is not UTF-8 becomes ``\xNN``.

    A ``str`` may be a message with names that `repr` has quoted. The escapes ``\udcNN`` of `repr` also become ``\xNN``.
    """
    text = data.decode("utf-8", "surrogateescape") if isinstance(data, bytes) else data
    if not text.isprintable():
        text = "".join(sign if sign.isprintable() else _escape(sign) for sign in text)
    if isinstance(data, str) and "\\udc" in text:
        text = _BYTE_IN_REPR.sub(r"\1\\x\2", text)
    return text


_SURROGATE = re.compile("[\ud800-\udfff]")


def encodable(text: str) -> str:
    r"""Return `text` with each lone surrogate escaped: ``\xNN`` for a byte that is not UTF-8. The rest is unchanged."""
    return text if text.isascii() else _SURROGATE.sub(lambda found: _escape(found[0]), text)


def _escape(sign: str) -> str:
    return f"\\x{ord(sign) - 0xDC00:02x}" if "\udc80" <= sign <= "\udcff" else ascii(sign)[1:-1]


_ESCAPED = re.compile("(%[0-9A-F]{2})+")

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-")
"""The characters that need no quoting in any shell."""


@lru_cache(maxsize=16)
def escape_word(text: str) -> str:
    """Return `text` as a word of printable characters without spaces. Different texts become different words.

    Each byte of a space, of ``%`` and of an unprintable character becomes ``%XX``, as in a URL. All other characters
    stay unchanged. A lone surrogate stands for a byte that is not UTF-8 (`os.fsdecode`).
    """
    return "".join(
        sign if sign.isprintable() and sign not in " %" else "".join(f"%{byte:02X}" for byte in _bytes(sign))
        for sign in text
    )


def unescape_word(word: str) -> str:
    """Return the text of which `escape_word` has made `word`."""
    return _ESCAPED.sub(lambda found: bytes.fromhex(found[0].replace("%", "")).decode("utf-8", "surrogateescape"), word)


def closer_look(path: str) -> str:
    """Return the end of a time-out message for the log at `path`: advice to run ``fscoord ps``."""
    return f"; to look closer, run fscoord ps {shell_word(path)}"


def shell_word(text: str) -> str:
    r"""Quote `text` as one printable word of a shell, like `shlex.quote`.

    Text with unprintable characters is quoted as ``$'...'``, which bash, zsh and most other shells support. The
    function imports no module, because it may run in a forked child in which imports fail.
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
