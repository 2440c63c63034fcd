"""How an operation waits, for threads and for tasks of an event loop alike.

A wait is a generator: it says what it waits for, or how long it would sleep, and its driver sleeps. `request` is for
code that waits for keys of a store, `parking` for a store that waits for events. `backoff` has the pauses between
tries, and `slow_wait` the warnings of a long wait.

Nothing here knows a store, a log or a file system. Callers hold no lock: a sleep may last as long as its deadline
allows.
"""
