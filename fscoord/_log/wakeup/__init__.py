"""The parts that wake the waiters of a log: the bell file, the watcher of its events, and the waiter.

Every wake-up is a hint. No part reads or appends records, or knows for which condition a waiter waits.
`fscoord.stores.file.waits` arms a waiter and reads the log. No part needs the log lock. A thread that waits holds
neither the log lock nor the process mutex. For an arrival at a barrier, `Waiter.arm` is called under both.
"""
