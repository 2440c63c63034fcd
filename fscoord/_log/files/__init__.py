"""Open and read the files of a log by paths and descriptors, without a handle.

`safe_files` opens, creates and writes files. `opening` opens or creates the file of a log. `torn_tail` classifies the
bytes after the last good record. `spill` reads long values, which stay in the file and not in memory.

Nothing here decides what to append, interprets keys, or takes the lock of a log in use. `opening` takes a lock, but
only on a file that has no header yet.
"""
