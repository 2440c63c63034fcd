"""Examines a directory: whether its file system keeps what a store on it promises, by trying, also between hosts."""
