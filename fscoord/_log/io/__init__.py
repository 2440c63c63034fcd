"""Open, read and append the files of a log.

Two halves. `safe_files`, `spill`, `torn_tail` and `opening` work on paths and descriptors, and know no handle.
`descriptors`, `cursor`, `writer` and `large_values` work on the state of one handle.

Nothing here decides what to append, takes the lock of a log in use, or knows keys; `opening` alone locks, a file that
has no header yet. The caller of the second half holds the process mutex. The caller of `writer` holds the log lock as
well, and has read to the end.
"""
