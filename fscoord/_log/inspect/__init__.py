"""Read logs that may be damaged. `fscoord.inspect` exports the public functions."""
