# Copyright (c) 2026, the fscoord authors
#
# SPDX-License-Identifier: BSD-3-Clause

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyPortalocker(PythonPackage):
    """Cross-platform locks of files. Here because py-fscoord needs a newer one than Spack's."""

    homepage = "https://github.com/WoLpH/portalocker"
    pypi = "portalocker/portalocker-4.4.2.tar.gz"

    license("BSD-3-Clause")

    version("4.4.2", sha256="7ac85bb2aa3c7873bf2ac72586fc6154afa4671ac786994a16617a6b7ccb3e5e")
    version("4.0.0", sha256="e66356cb1f4b385192a371292c15598c89cdafffe386fd0aed158c7a41e495bd")

    depends_on("py-uv-build@0.11:0", type="build", when="@4:")
    depends_on("python@3.10:", type=("build", "run"))
