"""Process-wide machinery: the replaceable operating system, forks, interrupts, events, network, signals, logging.

Only `system` imports modules for files, locks, processes and clocks, so that tests can replace the system under the
whole package. `interrupts` states the rules that keep an operation whole when a signal handler raises an exception.
`forks` runs the steps of every module in a forked child.

This package does not depend on stores, logs or keys. It imports only `errors` from the rest of fscoord. A thread
acquires the locks of this package last, and waits for no other lock while it holds one of them.
"""
