"""Text files and the words in them: the work that the demonstration shares out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import IO

from fscoord._runtime import system

__all__ = ["OWN_SOURCES", "count", "text_files"]

OWN_SOURCES = system.os.path.dirname(system.os.path.dirname(system.os.path.abspath(__file__)))
"""The directory that is counted by default: this package's own sources."""

_WORD = re.compile(r"[^\W\d_]+")
_PROBE = 8192
_LINE_MAX = 1024 * 1024


def text_files(directory: str) -> Iterator[str]:
    """Yield the paths, relative to `directory`, of the regular files below it that do not begin like binary ones."""
    for parent, _, names in system.os.walk(directory):
        for name in names:
            path = system.os.path.join(parent, name)
            if _is_text(path):
                yield system.os.path.relpath(path, directory)


def count(path: str) -> Counter[str]:
    """Return how often each word, in small letters, occurs in the file; what is not UTF-8 separates words."""
    words: Counter[str] = Counter()
    with _reading(path) as file:
        for line in iter(lambda: file.readline(_LINE_MAX), b""):
            words.update(_WORD.findall(line.decode("utf-8", "replace").lower()))
    return words


def _is_text(path: str) -> bool:
    try:
        if not system.stat.S_ISREG(system.os.lstat(path).st_mode):
            return False
        with _reading(path) as file:
            return b"\0" not in file.read(_PROBE)
    except PermissionError:
        return True  # the process that counts it will report the error
    except OSError:
        return False  # it has just gone


def _reading(path: str) -> IO[bytes]:
    descriptor = system.os.open(path, system.os.O_RDONLY | system.O_CLOEXEC | system.O_NOFOLLOW)
    return system.os.fdopen(descriptor, "rb")
