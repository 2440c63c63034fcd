"""Read and append the records of one handle.

`cursor` reads forward and applies records. `writer` appends records, and appends a VOID after a torn record.
`large_values` reads spilled values, which stay in the file and not in memory.

Nothing here decides what to append, interprets keys, or takes a lock. The caller holds the process mutex. The caller of
`writer` also holds the log lock, and has read to the end.
"""
