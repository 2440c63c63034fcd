"""The sessions of a log: which sessions the log has recorded, and which of them live.

`session_table` applies the records about sessions, and does no I/O. `liveness_file` locks and probes bytes.
`own_session` registers a handle, holds its byte, and probes the bytes of others.

A probe is evidence, and not a verdict. A session is dead when a death record exists. `log` or `generations.compaction`
appends that record after a probe under the log lock. Callers hold the process mutex. To take a byte or to register,
they also hold the log lock.
"""
