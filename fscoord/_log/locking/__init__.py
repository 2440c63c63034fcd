"""The locks of a log."""
