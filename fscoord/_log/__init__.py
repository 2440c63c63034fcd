"""The log of a replicated state machine: an append-only file that processes share. The package interprets no keys.

A writer appends a record while it holds the log's lock. Every handle reads the records in the order of the file, and
applies them to a state machine in its own memory. So a read needs no lock, and the processes need no server. All else
follows from three rules:

1. A byte never changes once a process may have seen an end of file after it. Nothing is truncated or overwritten.
2. A record counts from the moment its last byte is written, even if its writer dies at once. Checksums distinguish a
   complete record from any other bytes.
3. Every wake-up is a hint. A lost wake-up delays a waiter until its next poll, and changes no result.

The parts, from the bottom up. No part imports one that comes later (``LAYERS`` in tests/test_tidy.py):

- `format`: bytes to records and back. `recovery`: which invariants of a handle may not hold.
- `io`: open, read and append files. `locking`: exclude threads and processes. `state_machine`: apply records.
- `handle`: the state of one handle, which the parts below share.
- `liveness`: sessions and their deaths. `access`: coherent reads on each mount.
- `generations`: continue a log in a new file.
- `wakeup`: wake the waiters of a log. It reads no records.
- `combining`: let one process of a host append for all. `station` and its imports come before `log`, the rest after.
- `log`: one transaction, or one read, from lock to unlock. It imports every part, and no part imports it.
- `opened`: choose the access for a mount. `inspect`: read logs that may be damaged, without a handle.

docs/architecture/operations.md follows each kind of operation through these parts. docs/format.md specifies the bytes.
"""
