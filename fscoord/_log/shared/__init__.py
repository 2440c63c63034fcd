"""The parts of a log for mounts that several hosts share. A reader of a local log need not know this folder.

`network` reads and writes coherently, and `hang_watchdog` reports calls that hang in the kernel. `symlink_lock` is a
lock for mounts without advisory locks. `node_poller` elects one process of a host that polls the server for all
processes of the host, and `node_waiter` is a waiter that relies on this poller. The poller tells the waiters which keys
have changed, and gives them the bytes that it has read (`extent`). `combining` lets one process append for the others.

`sharing` creates these parts, and `log` imports only `sharing`. Each part says which locks its callers hold. Nothing
here interprets keys or values.
"""
