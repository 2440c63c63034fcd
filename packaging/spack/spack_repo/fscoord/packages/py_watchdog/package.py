# Copyright (c) 2026, the fscoord authors
#
# SPDX-License-Identifier: BSD-3-Clause

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyWatchdog(PythonPackage):
    """Filesystem events monitoring. Here because py-fscoord needs a newer one than Spack's."""

    homepage = "https://github.com/gorakhargosh/watchdog"
    pypi = "watchdog/watchdog-6.0.0.tar.gz"

    license("Apache-2.0")

    version("7.1.0", sha256="d3861e255416f49a1384474cb2efa097de165fb330d4c5432ce6708b509ed922")
    version("6.0.0", sha256="9ddf7c82fda3ae8e24decda1338ede66e1c99883db93711d8fb941eaa2d8c282")

    depends_on("c", type="build")

    depends_on("py-setuptools", type="build")
    depends_on("python@3.9:", type=("build", "run"))
    depends_on("python@3.11:", type=("build", "run"), when="@7:")
