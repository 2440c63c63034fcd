"""The stores, one per module, which know nothing of each other; `url` opens them by address."""
