"""How an operation waits, for threads and for tasks of an event loop alike.

A store makes one object of each wait, which is armed, looks, and returns for how long it may sleep; a driver sleeps.
Code that waits for keys of a store, such as a recipe, is a generator that yields requests. Both are in `wait`. `timing`
has the pauses between the tries of an operation, and the warnings of a long wait.

Nothing here knows a store, a log or a file system. Callers hold no lock: a sleep may last as long as its deadline
allows.
"""
