"""The demonstration: real processes share the work of counting words through one file, and report a process that dies.

`launcher` starts several processes ``python -m fscoord.demo.worker``, kills one of them on request, and passes their
reports on. The processes communicate with each other through the store alone.
"""
