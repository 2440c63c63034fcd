"""Open, read and append a log's files."""
