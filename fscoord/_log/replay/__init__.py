"""Read and append the records of one handle.

`cursor` reads forward and applies records. `writer` appends records, and voids a torn tail. `large_values` reads values
that memory does not keep.

Nothing here decides what to append, interprets keys, or takes a lock. The caller holds the process mutex. The caller of
`writer` also holds the log lock, and has read to the end.
"""
