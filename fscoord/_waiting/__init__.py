"""The waits of operations, for threads and for tasks of an event loop.

A store makes one `Wait` object for each wait. The object is armed, looks, and returns for how long to sleep. A driver
sleeps. Code that waits for keys of a store, such as a recipe, is a generator that yields requests. Waits, drivers and
requests are in the module `wait`. The module `timing` has the pauses between the tries of an operation, and the
warnings about a long wait.

This package does not depend on stores, logs or file systems. Its callers hold no lock, because a sleep may last until
the deadline.
"""
