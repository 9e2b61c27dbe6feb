"""CuPy itself without a GPU."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

PACKAGE, MODULE = "cupy-cuda13x", Path("cupy_backends/cuda/api/runtime.pyx")
FAKE = Path(__file__).with_name("fakert.c")
# As CuPy's install/cupy_builder has them (14.2).
CONSTANTS = {"CUPY_CUDA_VERSION": 13000, "CUPY_HIP_VERSION": 0}
CONSTANTS |= {"CUPY_USE_CUDA_PYTHON": False, "CUPY_CUFFT_STATIC": False}
DIRECTIVES = {"binding": False, "c_api_binop_methods": True}
DIRECTIVES |= {"freethreading_compatible": True, "warn.deprecated.IF": False}


def place() -> Path:
    return Path(sysconfig.get_path("purelib"), MODULE).parent


def is_here() -> bool:
    """Tell whether CuPy's runtime is replaced in this environment."""
    return any(b"fake CUDA runtime" in path.read_bytes() for path in place().glob("runtime.*.so"))


def unpacked(folder: Path) -> None:
    """Unpack the sources of the installed version."""
    version = importlib.metadata.version(PACKAGE)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=cupy", f"--dest={folder}"]
    # pip asks each source package for its metadata; CuPy's asks for CUDA then, unless this is set. What that needs is
    # here: an environment for it takes 3 CPU s.
    stub = {**os.environ, "CUPY_INSTALL_USE_STUB": "1"}
    subprocess.run([*pip, "--no-build-isolation", f"cupy=={version}"], env=stub, check=True)
    (archive,) = folder.glob("cupy-*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(folder, filter="data")
    archive.with_suffix("").with_suffix("").rename(folder / "cupy")


def symbols(file: Path, *options: str) -> set[str]:
    done = subprocess.run(["nm", *options, str(file)], check=True, capture_output=True, text=True)
    return {line.split()[-1] for line in done.stdout.splitlines() if line.split()[-1].startswith("cuda")}


def built(folder: Path) -> Path:
    """Build the module from the sources in a folder."""
    import numpy
    from Cython.Build import cythonize

    os.chdir(folder / "cupy")
    cythonize([str(MODULE)], language_level=3, quiet=True, compiler_directives=DIRECTIVES, compile_time_env=CONSTANTS)
    headers = Path(sysconfig.get_path("purelib"), "nvidia/cu13/include")
    seen = [headers, headers / "cccl", numpy.get_include(), sysconfig.get_path("include")]
    flags = ["-O0", "-fPIC", "-c", *(f"-I{path}" for path in seen), "-o"]
    generated, module, fake = MODULE.with_suffix(".c"), folder / "runtime.o", folder / "fakert.o"
    macros = ["-D_FORCE_INLINES=1", '-DCYTHON_EXTERN_C=extern "C"']
    subprocess.run(["g++", "-w", "-x", "c++", *macros, *flags, str(module), str(generated)], check=True)
    warn = ["-std=gnu11", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *warn, *flags, str(fake), str(FAKE)], check=True)
    rest = sorted(symbols(module, "-u") - symbols(fake, "--defined-only"))
    (folder / "rest.c").write_text("".join(f"int {name}(void) {{ return 801; }}\n" for name in rest))
    target = folder / f"runtime{sysconfig.get_config_var('EXT_SUFFIX')}"
    libraries = ["-fPIC", "-shared", "-fno-builtin", "-w", "-ldl", "-pthread"]
    sources = [str(module), str(fake), str(folder / "rest.c")]
    subprocess.run(["gcc", *sources, *libraries, "-lstdc++", "-o", str(target)], check=True)
    return target


def main() -> None:
    python = Path(sysconfig.get_path("include"), "Python.h")
    if not (shutil.which("gcc") and shutil.which("g++") and python.exists()):
        print(
            "CuPy's runtime stays, and tests/cupy is skipped: a C++ compiler or Python.h is missing (g++, python3-dev)"
        )
        return
    with tempfile.TemporaryDirectory() as name:
        unpacked(Path(name))
        made = built(Path(name))
        # a new file: one that a process has loaded must not change under it
        fresh = place() / f"{made.name}.new"
        fresh.write_bytes(made.read_bytes())
        fresh.replace(place() / made.name)


if __name__ == "__main__":
    main()
