"""The bytes of a log. Pure: no I/O, no clock."""
