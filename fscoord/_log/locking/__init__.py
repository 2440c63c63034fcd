"""The locks of a log: between the threads of one process, and between processes."""
