"""Wake the waiters of a log."""
