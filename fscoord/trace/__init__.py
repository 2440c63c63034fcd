"""Reads the trace of a job, puts the spans of all processes on one time line, and makes tables and pictures.

`_runtime.tracing` writes the files of the trace. This package opens no store and changes no file.
"""
