"""The bytes of a log: headers, records, control records, names of generations, and what they mean.

Everything here is pure: no I/O, no clock, no lock, no state. A function gets bytes and returns values, or raises
`MalformedRecord` if a checksum is right and the content is not what the format allows. `io.torn_tail` decides about
bytes that are not a record. docs/format.md specifies all of it, and changes with it.
"""
