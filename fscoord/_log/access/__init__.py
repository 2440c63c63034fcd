"""Coherent reads and writes of a log on each kind of mount.

`mount` finds the kind of file system of a path. `local` reads through the page cache; `network` reads and writes
coherently where several hosts share a log. `hang_watchdog` reports calls that hang in the kernel.

An access reads and writes bytes, and checks that the path still leads to the log. It does not decode records (the
cursor does), and does not take the log lock. Callers hold the process mutex, and for `catch_up` and `write` also the
log lock.
"""
