"""Test, also between hosts, whether the file system of a directory fulfils the needs of a store."""
