"""The parts that wake the waiters of a log: the bell, its watcher, the sleep of one waiter, and the poller of a host.

Every wake-up is a hint. No part reads or appends records, or knows for which condition a waiter waits.
`fscoord.stores.file.waits` arms a waiter and reads the log. No part needs the log lock. While a caller waits, it holds
neither the log lock nor the process mutex. Two parts run under the process mutex: `changed_keys`, which gets the
records when they are applied, and `Waiter.arm` for an arrival at a barrier, under the log lock as well.
"""
