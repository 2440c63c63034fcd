"""The demonstration: real processes share the counting of words through one file, and name the one that dies.

`launcher` starts ``python -m fscoord.demo.worker`` several times, kills one if asked to, and passes on what they
report. All else is between the processes and goes through the store alone.
"""
