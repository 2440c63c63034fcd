"""Which of the sessions of a log live.

`liveness_file` locks and probes bytes. `_log.session_table` has the sessions that the log has recorded.
`own_session` registers a handle, holds its byte, and probes the bytes of others.

A probe is evidence, and not a verdict. A session is dead when a death record exists. `log` or `generations.compaction`
appends that record after a probe under the log lock. Callers hold the process mutex. To take a byte or to register,
they also hold the log lock.
"""
