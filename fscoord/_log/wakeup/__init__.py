"""Wake the waiters of a log: the bell, the watcher of it, the sleep of one waiter, and the poller of a host.

All of it is a hint. Nothing here reads or appends records, or knows what is waited for: the wait that arms a waiter and
reads the log is `fscoord.stores.file.waits`. No part of this folder needs the log lock, and a caller holds neither that
nor the process mutex while it waits. `changed_keys` alone runs under the process mutex, because it is applied with the
records.
"""
