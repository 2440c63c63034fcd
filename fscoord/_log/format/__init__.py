"""The bytes of a log: headers, records and what they mean. Pure: no I/O, no clock."""
