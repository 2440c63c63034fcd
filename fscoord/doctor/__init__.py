"""Tests whether the file system of a directory is fit for a store, on one host or between several."""
