"""Open, read and append the files of a log.

The package has two halves. `safe_files`, `spill`, `torn_tail` and `opening` work on paths and descriptors, without a
handle. `cursor`, `writer` and `large_values` work on the state of one handle.

Nothing here decides what to append, interprets keys, or takes the lock of a log in use. Only `opening` takes a lock, on
a file that has no header yet. The caller of the second half holds the process mutex. The caller of `writer` also holds
the log lock, and has read to the end.
"""
