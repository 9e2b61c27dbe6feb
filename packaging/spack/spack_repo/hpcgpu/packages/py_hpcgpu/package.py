"""hpcgpu, for ``spack dev-build`` in a clone, or ``spack install --no-checksum`` beside the sdist of ``make release``."""

import os

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHpcgpu(PythonPackage):
    """A Dask cluster on the GPUs of a Slurm or PBS job: MPI rank 0 is the scheduler, and each GPU has a worker."""

    homepage = "https://distributed.dask.org/"  # hpcgpu has none so far
    url = f"file://{os.getcwd()}/hpcgpu-0.1.0a2.tar.gz"
    manual_download = True

    license("BSD-3-Clause")

    version("0.1.0a2")

    variant("dashboard", default=True, description="Dask's dashboard")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-hatchling@1.27:", type="build")

    with default_args(type=("build", "run")):
        depends_on("py-click@8.2.1:")
        depends_on("py-cryptography@42:")
        depends_on("py-dask@2025.4:")
        depends_on("py-distributed@2025.4:")
        depends_on("py-mpi4py@4.1:")
        depends_on("py-msgspec@0.18.6:")
        depends_on("py-numpy@1.26:")
        depends_on("py-nvidia-ml-py@12.550:")
        depends_on("py-psutil@5.9.4:")
        depends_on("py-pyyaml@6:")
        depends_on("py-rich@14.3:")
        depends_on("py-wrapt@2:")
        depends_on("py-bokeh@3.1:", when="+dashboard")
