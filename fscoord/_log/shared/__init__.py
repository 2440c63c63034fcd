"""The parts of a log for mounts that several hosts share. A reader of a local log need not know this folder.

`network` reads and writes coherently, and `hang_watchdog` reports calls that hang in the kernel. `symlink_lock` is a
lock for mounts without advisory locks. `node_poller` lets one process of a host poll the server for all processes of
the host, and `node_waiter` is the sleep of a wait beside the poller. The changed keys and the `extent` are the news
that the poller gives the waits. `combining` lets one process of a host append for all.

`sharing` holds these parts, and `log` names only `sharing`. Each part says which locks its callers hold. Nothing here
interprets keys or values.
"""
