"""The stores, one module or package each: `file`, `memory`, `prefix`, `tcp`, `etcd`, and `url`, which opens them.

A store implements the contract in `fscoord.store` and knows no other store. Only `url` imports its siblings, and only
`file` imports `_log`. No store implements barriers or recipes: those are written against the contract. A store takes no
lock that its caller could hold.
"""
