"""Wake the waiters of a log: the bell, the watch on it, the sleep of one waiter, and the poller of a host.

All of it is a hint. Nothing here reads or appends records, or knows what is waited for: the loop around a sleep, which
looks at the log, is `fscoord.stores.file.notifier`. No part of this folder needs the log lock, and a caller holds
neither that nor the process mutex while it waits. `changed_keys` alone runs under the process mutex, for it is applied
with the records.
"""
