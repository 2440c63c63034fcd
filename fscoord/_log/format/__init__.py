"""The format of a log: headers, records, control records, and names of generations.

Everything here is pure: no I/O, no clock, no lock, no state. A decoder gets bytes and returns values. It raises
`MalformedRecord` if a checksum is right but the format does not allow the content. `files.torn_tail` classifies bytes
that are not a record. docs/contributors/format.md specifies the format, and must change with this package.
"""
