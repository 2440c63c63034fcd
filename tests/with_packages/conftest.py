"""The integrations with the packages that they plug into: `tox -e packages` has these, other environments do not."""

from importlib.util import find_spec

NEEDS = {
    "test_bootstrap.py": "torch",
    "test_dask.py": "distributed",
    "test_freezegun.py": "freezegun",
    "test_green_threads.py": "gevent",
    "test_jax.py": "jax",
    "test_lightning.py": "lightning",
    "test_opentelemetry.py": "opentelemetry",
    "test_optuna.py": "optuna",
    "test_tooz.py": "tooz",
    "test_types.py": "mypy",
}
collect_ignore_glob = [f"{name[:-3]}*.py" for name, package in NEEDS.items() if find_spec(package) is None]
