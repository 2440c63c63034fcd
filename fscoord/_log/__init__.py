"""One append-only file that processes share: a replicated state machine whose log is that file. It knows no keys.

A writer appends a record while it holds the log's lock. Every handle reads the records in the order of the file, and
applies them to a state machine in its own memory. So a read needs no lock, and the processes need no server. Three
rules carry the rest:

1. Bytes below an end of file that a process may have seen never change. Nothing is truncated or overwritten.
2. A record counts from the moment its last byte is written, whatever becomes of its writer. Checksums tell a complete
   record from any other bytes.
3. Every wake-up is a hint. A lost one costs the time until the next poll, and never an answer.

The parts, from the bottom up. No part imports one that comes later (``LAYERS`` in tests/test_tidy.py):

- `format`: bytes to records and back. `recovery`: which invariants of a handle may not hold.
- `io`: open, read and append files. `locking`: exclude threads and processes. `state_machine`: what applies records.
- `handle`: the state of one handle, which the parts below share.
- `liveness`: sessions and their deaths. `access`: the way of each mount. `generations`: from one file to the next.
- `wakeup`: wake the waiters of a log. It reads no records.
- `log`: one transaction, or one read, from lock to unlock. It imports every part, and no part imports it.
- `opened`: open a log in the way of its mount. `inspect`: read logs that may be damaged, without a handle.

docs/architecture.md follows each kind of operation through these parts. docs/format.md specifies the bytes.
"""
