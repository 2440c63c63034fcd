"""The locks of a log: between the threads of one process, and between processes.

`process_mutex` has the mutex of each log. `log_lock` has the log lock in three kinds. `kernel_wait` blocks in the
kernel for a waiter and hands the lock over.

Nothing here reads or writes records. A caller of `LogLock.try_lock`, `unlock` and `bind` holds the process mutex. A
caller of `wait_for_lock` holds no lock, because the wait may take long.
"""
