"""Sessions, and which of them live."""
