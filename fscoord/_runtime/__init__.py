"""Process-wide services: system calls, forks, interrupts, file events, network, signals, logging, tracing.

Only `system` imports the standard modules for files, locks, processes and clocks, so that a test can replace them for
the whole package. `interrupts` has the rules for code that a signal handler may interrupt with an exception. `forks`
resets the modules of fscoord in a forked child.

This package does not depend on stores, logs or keys. The package imports only `errors` from the rest of fscoord. The
locks of this package are the last in the lock order: a thread that holds such a lock waits for no other lock.
"""
