"""The parts that wake the waiters of a log: the bell file, the watcher of its events, and the waiter.

Every wake-up is a hint. No part reads or appends records, or knows for which condition a waiter waits.
`fscoord.stores.file.waits` arms a waiter and reads the log.

No part needs the log lock. A thread that sleeps holds no log lock and no process mutex. A thread that arrives at a
barrier holds the log lock and the process mutex while it calls `Waiter.arm`.
"""
