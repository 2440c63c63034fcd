"""Find out which sessions of a log are alive.

Each session locks a byte of the liveness file. `liveness_file` locks and probes bytes. `own_session` registers a
handle, locks its byte, and probes the bytes of other sessions. `_log.session_table` holds the recorded sessions.

A probe alone does not make a session dead: a session is dead when the log has its death record. `log` or
`generations.compaction` appends that record after a probe under the log lock. Callers hold the process mutex. To lock a
byte or to register, they also hold the log lock.
"""
