"""The parts that wake the waiters of a log: the bell, its watcher, and the sleep of one waiter.

Every wake-up is a hint. No part reads or appends records, or knows for which condition a waiter waits.
`fscoord.stores.file.waits` arms a waiter and reads the log. No part needs the log lock. While a caller waits, it holds
neither the log lock nor the process mutex. Only `Waiter.arm` for an arrival at a barrier runs under both.
"""
