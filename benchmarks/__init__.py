"""Measure fscoord beside torch's stores, in the same run on the same machine: `python -m benchmarks`."""
