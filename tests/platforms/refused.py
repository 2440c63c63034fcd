"""Open a `FileStore` without and with a path, and print the error of each."""

from __future__ import annotations

import sys

import fscoord

for arguments in [(), (sys.argv[1],)]:
    try:
        fscoord.FileStore(*arguments)
    except fscoord.UnsupportedFilesystemError as error:
        print(error)
    else:
        raise SystemExit("FileStore opened without locks")
