"""Read logs that may be damaged: verify, dump, repair and copy. `fscoord.inspect` exports the public functions.

Nothing here changes the log that it reads: `repair` and `copy` write another log. This package uses neither a handle
nor a process mutex, because a damaged log can't be opened. A scan begins without a lock. If it finds bytes that look
unfinished or damaged, it locks writers out and reads these bytes again.
"""
