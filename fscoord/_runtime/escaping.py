"""`escape_word`: text of the machine for keys and values, where a space or a newline would part them. Pure."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["escape_word"]


@lru_cache(maxsize=16)
def escape_word(text: str) -> str:
    """Return `text` as a word of printable characters, without a space; other text is another word.

    Letters of all alphabets, digits and signs stay as they are. Of all else, and of ``%``, each byte is written as
    ``%XX``, as in a URL; lone surrogates stand for bytes that are no UTF-8 (`os.fsdecode`).
    """
    return "".join(
        sign if sign.isprintable() and sign not in " %" else "".join(f"%{byte:02X}" for byte in _bytes(sign))
        for sign in text
    )


def _bytes(sign: str) -> bytes:
    return sign.encode("utf-8", "surrogateescape" if "\udc80" <= sign <= "\udcff" else "surrogatepass")
