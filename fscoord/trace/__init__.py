"""Traces of a job, for analysis: the spans of all its processes on one time line, tables, and pictures.

`_runtime.tracing` records. This package reads the files, estimates the offsets of the clocks, and shows the result. It
opens no store and changes no file.
"""
