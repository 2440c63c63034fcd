"""The locks of a log: between the threads of one process, and between processes.

`process_mutex` has the mutex between the threads of a process. `log_lock` has the three kinds of lock between
processes. `kernel_wait` has the thread that waits for a log lock in the kernel and hands it over to a waiter.

Nothing here reads or writes records. A caller of `LogLock.try_lock`, `unlock` and `bind` holds the process mutex. A
caller of `wait_for_lock` holds no lock, because the wait may take long.
"""
