"""The log of a replicated state machine: an append-only file that processes share. The package interprets no keys.

A writer appends a record while it holds the log's lock. Every handle reads the records in the order of the file, and
applies them to a state machine in its own memory. So a read needs no lock, and the processes need no server. All else
follows from three rules:

1. A byte that a process may have read never changes. Nothing is truncated or overwritten.
2. A record takes effect when its last byte is written, even if its writer dies at that moment. Checksums distinguish a
   complete record from any other bytes.
3. Every wake-up is a hint. A lost wake-up delays a waiter until its next poll, and changes no result.

The parts, from the bottom up. No part imports a part that follows it in this list (see tests/imports.txt):

- `format`: bytes to records and back. `recovery`: flags for the invariants of a handle that may be broken.
- `mount`: the file system of a path. `files`: open and read files. `locking`: exclude threads and processes.
- `state_machine`: apply records. `session_table`: the sessions that the log has recorded.
- `handle`: the state of one handle, which the parts below share. `replay`: read and append its records.
- `liveness`: sessions and their deaths. `access`: reads and writes on a local mount.
- `generations`: continue a log in a new file.
- `wakeup`: wake the waiters of a log. It reads no records.
- `log`: one transaction, or one read, from lock to unlock.
- `opened`: choose the access for a mount. `inspect`: read logs that may be damaged, without a handle.
- `shared`: the parts for a log that several hosts share. Only `shared.combining` imports `log`: it begins transactions.

docs/contributors/architecture/operations.md follows each kind of operation through these parts.
docs/contributors/format.md specifies the bytes.
"""
