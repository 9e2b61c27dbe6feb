"""GPUs that NVML shows to a child process: ``fake_nvml.c``, a small libnvidia-ml.so.1."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")
MIB = 2**20


@dataclass(frozen=True)
class FakeSlice:
    """A MIG slice. ``name`` as drivers since 470 give it; ``error``: what NVML answers (4: no permission)."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    size_mib: int = 9728
    compute: int = 1
    slices: int = 1
    error: int = 0


@dataclass(frozen=True)
class FakeGpu:
    """A GPU. ``parts``: its MIG slices, None for a number that NVML leaves out; not given: not divided."""

    pci: str
    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    size_mib: int = 81559
    error: int = 0
    memory_node: int = -1
    parts: Sequence[FakeSlice | None] | None = field(default=None)

    def lines(self) -> Iterator[str]:
        divided = int(self.parts is not None)
        memory = self.size_mib * MIB
        yield f"gpu|{self.pci}|{self.uuid}|{self.name}|{memory}|{self.error}|{self.memory_node}|{divided}|0|0|0"
        for part in self.parts or ():
            if part is None:
                yield "gap|-|-|-|0|0|-1|0|0|0|0"
            else:
                facts = f"{part.size_mib * MIB}|{part.error}|-1|0|{part.compute}|{part.slices}|{part.size_mib}"
                yield f"slice|-|{part.uuid}|{part.name}|{facts}"


@dataclass(frozen=True)
class FakeNvml:
    folder: Path

    def environment(self, gpus: Sequence[FakeGpu]) -> dict[str, str]:
        """Return the variables with which a new process finds these GPUs."""
        lines = "\n".join(line for gpu in gpus for line in gpu.lines())
        return {**os.environ, "LD_LIBRARY_PATH": str(self.folder), "FAKE_NVML_GPUS": lines}


def compiled(folder: Path, *options: str) -> FakeNvml:
    """Compile it into ``folder``; ``-DOLD_DRIVER``: without nvmlDeviceGetNumaNodeId."""
    compile_library(SOURCE, folder / "libnvidia-ml.so.1", *options)
    return FakeNvml(folder)


def compile_library(source: Path, target: Path, *options: str) -> None:
    """Compile a shared library, which a new process finds by LD_LIBRARY_PATH."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip(f"no gcc here to compile {source.name} (Debian: gcc and libc6-dev)")
    argv = [gcc, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *options]
    subprocess.run([*argv, "-o", str(target), str(source)], check=True, timeout=60)
