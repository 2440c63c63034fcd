"""The stores, one module or package each: `file`, `memory`, `prefix`, `tcp` and `etcd`. `url` opens them by address.

A store implements the contract in `fscoord.store` and does not use the other stores. Only `url` imports the other
modules of this package, and only `file` imports `_log`. No store implements barriers or recipes, because barriers and
recipes use only the contract. A store acquires no lock that its caller could hold.
"""
