# Copyright (c) 2026, the fscoord authors
#
# SPDX-License-Identifier: BSD-3-Clause

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyFscoord(PythonPackage):
    """Processes that share nothing but a directory find each other and agree: a c10d-style
    store, barriers and queues in one file."""

    pypi = "fscoord/fscoord-0.1.0.tar.gz"

    license("BSD-3-Clause")

    # The archive does not know its own checksum: packaging/release.py adds it to a copy.
    version("0.1.0")

    variant("cli", default=True, description="Install what the command fscoord needs")
    variant("etcd", default=False, description="Install what a store on etcd needs")

    with default_args(type="build"):
        depends_on("py-hatchling@1.27:")

    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-portalocker@4.0.0:4")
        depends_on("py-watchdog@6.0.0:7")
        depends_on("py-click@8.1.8:8", when="+cli")
        depends_on("py-rich@13.9.0:15", when="+cli")
        depends_on("py-urllib3@2.3:2", when="+etcd")
