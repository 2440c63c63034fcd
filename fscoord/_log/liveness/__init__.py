"""Sessions: which the log has recorded, and which of them live.

`session_table` holds what the records say, and does no I/O. `liveness_file` locks and probes bytes. `own_session`
registers a handle, holds its byte, and probes those of others.

A probe is evidence. Nothing here calls a session dead: a death record does, which `log` or `generations.compaction`
appends after a probe under the log lock. Callers hold the process mutex, and the log lock to take a byte or to
register.
"""
