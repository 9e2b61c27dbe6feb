"""A CUDA driver without a GPU for a child process: ``fake_cuda.c``, a small libcuda.so.1."""

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from fake_nvml import compile_library
from paths import ROOT, TESTS
from waiting import scaled

SOURCE = Path(__file__).with_suffix(".c")


def compiled(folder: Path) -> dict[str, str]:
    """Compile it into ``folder``; return the variables with which a new process finds it."""
    compile_library(SOURCE, folder / "libcuda.so.1", "-pthread", "-O1", "-Wl,-soname,libcuda.so.1")
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def not_passed(folder: Path, tests: Sequence[str], *options: str) -> list[str]:
    """Run tests of ``tests/gpu`` in a child that finds it; return which failed or were skipped, and why."""
    report = folder / "tests.xml"
    argv = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    argv += [f"--basetemp={folder}/tests", f"--junitxml={report}", *(str(TESTS / "gpu" / name) for name in tests)]
    done = subprocess.run(argv, env=compiled(folder), cwd=ROOT, capture_output=True, text=True, timeout=scaled(150))
    if done.returncode:
        return [done.stdout + done.stderr]
    cases = list(ElementTree.parse(report).iter("testcase"))
    return [f"{case.get('name')}: {case[0].get('message')}" for case in cases if len(case)] if cases else ["no test"]


def secret_pages(nbytes: int) -> np.ndarray:
    """Map memory that the kernel copies for no other process, as page-locked memory of NVIDIA's driver 525."""
    fd = ctypes.CDLL(None).syscall(447, 0)  # memfd_secret, Linux 5.14
    try:
        os.ftruncate(fd, nbytes)
        return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    except OSError as e:
        pytest.skip(f"no memory here that other processes cannot read: {e}")
    finally:
        os.close(fd) if fd >= 0 else None


class Standin:
    """The driver of this process, if it is this one."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._count, self.mend, self.lose = library.fake_cuda_count, library.fake_cuda_mend, library.fake_cuda_lose
        self._count.restype, self._lose_after = ctypes.c_longlong, library.fake_cuda_lose_after

    def lose_after(self, code: int, calls: int) -> None:
        """Let each call fail, as on a lost GPU, once so many more were answered."""
        self._lose_after(code, ctypes.c_longlong(calls))

    def count(self, what: str) -> int:
        """Return what ``fake_cuda.c`` counts, by its name there."""
        return int(self._count(what.encode()))
