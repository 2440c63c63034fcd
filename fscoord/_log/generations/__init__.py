"""From one generation of a log to the next."""
