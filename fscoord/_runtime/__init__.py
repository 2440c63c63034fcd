"""Process-wide machinery: the replaceable operating system, forks, interrupts, events, network, signals, logging.

Only `system` imports modules for files, locks, processes and clocks, so that tests can replace the system under the
whole package. `interrupts` states the rules that keep an operation whole when a signal handler raises. `forks` runs the
steps of every module in a forked child.

Nothing here knows stores, logs or keys, or imports a module of the package but `errors`. The locks in it are taken
last, and no other lock is waited for under them.
"""
