"""How operations wait, in threads and in tasks of an event loop.

A store creates one `Wait` object for each wait. The object tests the condition of the wait, and computes how long to
sleep until the next test. A driver sleeps. Code that waits for keys of a store, such as a recipe, is a generator that
yields requests. Waits, drivers and requests are in the module `wait`. The module `timing` has the pauses between
retries of an operation, and the warnings about a long wait.

This package does not depend on stores, logs or file systems. A caller of this package holds no lock, because a sleep
may last until the deadline.
"""
