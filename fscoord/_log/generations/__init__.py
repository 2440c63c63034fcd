"""The change from one generation of a log to the next: follow a seal, compact, forward, remove.

`follower` opens a log and follows its seals. `compaction` decides whether to compact, creates the next generation, and
seals the generation in use. `forwarding` records the newest generation in generation 0, and removes superseded files.

Nothing here takes the log lock, which is the lock of the generation in use. Callers of `follower` hold the process
mutex. Callers of `compaction` also hold the log lock, and have read to the end. `compaction` then takes further locks:
those of the next generation, of generation 0, and of orphans (files that no seal names).
"""
