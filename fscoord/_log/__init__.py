"""One append-only file that processes share: framed, checksummed, locked, followed. It knows no keys."""
