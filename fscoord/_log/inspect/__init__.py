"""Read logs that may be damaged."""
