"""Try each channel that hpcgpu comes by, in containers of a bare Debian, and print a row for each: ``make channels``.

Only files of this checkout and what an index of Python's packages and Debian's mirror have are needed, and Docker. With
``SPACK_ROOT`` (a Spack with spack-packages beside it, as `spack repo list` says) its recipe is concretized, too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docker"))
import context  # noqa: E402

LIMIT_S, TOO_LONG = 1500, 124  # for each channel; timeout(1) tells by this exit code
# In a container: the wheel and sdist in /build, beside what this host needs to reach an index.
PRELUDE = """
set -e; cd /build; export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
echo 'Acquire::Check-Valid-Until "false";' > /etc/apt/apt.conf.d/old
apt() { apt-get update -qq > /dev/null; apt-get install -qq -y --no-install-recommends "$@" > /dev/null 2>&1; }
apt ca-certificates python3 python3-venv
cp *.crt /usr/local/share/ca-certificates/ 2> /dev/null || true; update-ca-certificates > /dev/null 2>&1
export PIP_CONFIG_FILE=/build/pip.conf PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_NO_CACHE_DIR=1
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/build/constraints.txt
size() { du -sm "$1" | sed 's/\\t.*/ MB/'; }
venv() { python3 -m venv /opt/hpcgpu; /opt/hpcgpu/bin/pip install -q "$1[mpi-runtime]"; size /opt/hpcgpu; }
tool() { python3 -m venv /opt/tool; PIP_CONSTRAINT= /opt/tool/bin/pip install -q "$@"; }
"""
EIGHT = "hpcgpu run --gpus sim:8 eight.py"
EIGHT_PY = """from distributed import Client
with Client() as client:
    print(len(client.nthreads()), "workers; a sum on all of them:", sum(client.gather(client.map(abs, range(-8, 0)))))
"""
# All that the easyconfig asks for is looked up. Built is hpcgpu with its extensions, on a Python of a module that has
# the rest: foss itself takes hours, and sources that no index of Python's packages has.
EASYBUILD = f"""
apt lmod gcc libc6-dev python3-dev; . /etc/profile.d/lmod.sh; tool easybuild; export HOME=/tmp PATH=/opt/tool/bin:$PATH
root=--allow-use-as-root-and-accept-consequences
easy() {{ eb $root "$@" hpcgpu-*.eb > log 2>&1 || {{ tail -n 20 log; exit 1; }}; }}
easy --robot --dry-run; number=$(grep -c '^ \\*' log)
venv "$(echo hpcgpu-*.whl)" > /dev/null; (
  cd /opt/hpcgpu/bin; ./pip uninstall -q -y hpcgpu msgspec nvidia-ml-py
  PIP_CONSTRAINT= ./pip install -q -U setuptools setuptools-scm hatchling)
sdists=$(sed -nE "s/^ +\\('([a-z-]+)', '([0-9.]+)', .*/\\1==\\2/p" hpcgpu-*.eb)
PIP_CONSTRAINT= /opt/tool/bin/pip download -q --no-deps --no-binary :all: $sdists
version=$(python3 -c 'import platform; print(platform.python_version())'); mkdir -p eb/modules/all/Python
cat > eb/modules/all/Python/$version.lua << END
setenv("EBROOTPYTHON", "/opt/hpcgpu")
setenv("EBVERSIONPYTHON", "$version")
prepend_path("PATH", "/opt/hpcgpu/bin")
END
sed -i "s/('Python', '[^']*')/('Python', '$version')/" hpcgpu-*.eb
easy --disable-map-toolchains --try-toolchain=system,system --prefix=/build/eb --sourcepath=/build \
  --filter-deps=Python-bundle-PyPI,SciPy-bundle,PyYAML,bokeh,dask,mpi4py,wrapt
module use eb/modules/all; module load hpcgpu; size eb/software/hpcgpu
echo "dry run: $number easyconfigs; built on a Python of the system: $({EIGHT})"
"""
# Without conda-forge, which many cannot reach: its packages are made of the wheels.
CONDA = f"""
venv ./hpcgpu-*.whl > /dev/null; /opt/hpcgpu/bin/pip install -q hatchling
tool packaging py-rattler py-rattler-build
tar -xzf hpcgpu-*.tar.gz; recipe=$(echo hpcgpu-*/)packaging/conda/recipe.yaml
mkdir -p "${{recipe%/*}}" conda; mv recipe.yaml "$recipe"
/opt/tool/bin/python conda_channel.py /opt/hpcgpu "$recipe" conda {EIGHT} 2> log || {{ tail -n 20 log; exit 1; }}
"""


@dataclass(frozen=True)
class Channel:
    """What a person types, and a script that tries it: its first line is a size, its last line the result."""

    name: str
    command: str
    script: str
    debian: str = "bookworm"
    options: tuple[str, ...] = ()


PIP = "python3 -m venv /opt/hpcgpu && /opt/hpcgpu/bin/pip install '{}[mpi-runtime]'"
CHANNELS = (
    Channel("wheel", PIP.format("hpcgpu-*.whl"), f"venv ./hpcgpu-*.whl; PATH=/opt/hpcgpu/bin:$PATH {EIGHT}"),
    Channel("sdist", PIP.format("hpcgpu-*.tar.gz"), f"venv ./hpcgpu-*.tar.gz; PATH=/opt/hpcgpu/bin:$PATH {EIGHT}"),
    Channel(
        "Lmod",
        "module use packaging/lmod && module load hpcgpu",
        f"venv ./hpcgpu-*.whl; apt lmod; . /etc/profile.d/lmod.sh; module use lmod; module load hpcgpu; {EIGHT}",
    ),
    Channel("EasyBuild", "eb --robot packaging/easybuild/hpcgpu-*.eb", EASYBUILD),
    Channel("conda", "rattler-build build --recipe packaging/conda", CONDA),
    Channel(
        "Apptainer",
        "apptainer build hpcgpu.sif packaging/apptainer/hpcgpu.def",
        "apt apptainer squashfs-tools;"
        " sed -i 's/^Bootstrap:.*/Bootstrap: docker-archive/; s/^From:.*/From: base.tar/' hpcgpu.def;"
        " mkdir -p dist; cp *.whl pip.conf dist; cp *.crt dist 2> /dev/null || true;"
        " sed -i '/apt-get clean/i cp /opt/dist/*.crt /usr/local/share/ca-certificates || true; update-ca-certificates"
        "; cp /opt/dist/pip.conf /etc' hpcgpu.def;"
        " apptainer build hpcgpu.sif hpcgpu.def > log 2>&1 || { tail -n 20 log; exit 1; };"
        f" size hpcgpu.sif; apptainer exec --pwd /build hpcgpu.sif {EIGHT}",
        debian="sid",
        options=("--privileged",),
    ),
)


def run(argv: list[str], limit_s: int = LIMIT_S) -> tuple[bool, list[str]]:
    """Run a command, and end it where it takes too long; return whether it ended well, and its lines."""
    argv = ["timeout", "--kill-after=60", str(limit_s), *argv]  # Docker's client passes its signal on to the container
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    if done.returncode == TOO_LONG:
        return False, [f"not finished in {limit_s} s"]
    lines = done.stdout.strip().splitlines()
    return done.returncode == 0, lines if done.returncode == 0 else [*lines, *done.stderr.strip().splitlines()]


def proxies() -> list[str]:
    """Return the host's proxies as options of docker run."""
    names = [n for n in ("http_proxy", "https_proxy", "no_proxy") if os.environ.get(n)]
    return [word for name in names for word in ("--env", name)]


def write(folder: Path) -> None:
    """Write what a container sees in /build."""
    for kind in ("wheel", "sdist"):
        ok, lines = run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)])
        if not ok:
            sys.exit("\n".join(lines))
    shutil.copytree(ROOT / "packaging/lmod", folder / "lmod")
    recipes = ("packaging/*/*.eb", "packaging/conda/*.yaml", "packaging/apptainer/*.def")
    for pattern in ("constraints.txt", "scripts/conda_channel.py", *recipes):
        for path in ROOT.glob(pattern):
            shutil.copy(path, folder)
    (folder / "pip.conf").write_text(context.pip_conf())
    (folder / "eight.py").write_text(EIGHT_PY)
    for number, ca in enumerate(context.cas()):
        shutil.copyfile(ca, folder / f"{number}-{ca.stem}.crt")


def base_image(debian: str) -> tuple[bool, list[str]]:
    """Make sure of Debian's image: where it cannot be pulled, debootstrap makes it."""
    return run(["env", f"DEBIAN={debian}", "docker/lab.sh", "base"])


def in_container(channel: Channel, build: Path, limit_s: int) -> tuple[bool, list[str]]:
    """Run a channel's script in a copy of the folder, in a bare Debian."""
    there, lines = base_image(channel.debian)
    if not there:
        return there, lines
    base = f"debian:{channel.debian}-slim"
    runs, runs_with_options = (run(["docker", "run", "--rm", *o, base, "true"])[0] for o in ((), channel.options))
    if runs and not runs_with_options:
        return True, ["-", f"not tried: Docker refuses {' '.join(channel.options)} here"]
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(build, copy, dirs_exist_ok=True)
        if "docker-archive" in channel.script:
            run(["docker", "save", "-o", f"{copy}/base.tar", "debian:bookworm-slim"])
        argv = ["docker", "run", "--rm", "--init", "--network", "host", "-v", f"{copy}:/build", *proxies()]
        return run([*argv, *channel.options, base, "bash", "-c", PRELUDE + channel.script], limit_s)


def spack(limit_s: int) -> tuple[bool, list[str]]:
    """Concretize the recipe with the Spack of SPACK_ROOT."""
    if not (root := os.environ.get("SPACK_ROOT")):
        return True, ["-", "not tried: SPACK_ROOT is not set"]
    with tempfile.TemporaryDirectory() as scope:
        (Path(scope) / "repos.yaml").write_text(f"repos:\n  hpcgpu: {ROOT}/packaging/spack/spack_repo/hpcgpu\n")
        ok, lines = run([f"{root}/bin/spack", "-C", scope, "spec", "py-hpcgpu"], limit_s)
    return ok, ["-", f"concretized: {sum('@' in line for line in lines)} specs"] if ok else lines


def image(limit_s: int) -> tuple[bool, list[str]]:
    """Build the image and start eight workers in it."""
    ok, lines = base_image("bookworm")
    if ok:
        ok, lines = run(["scripts/packaging.sh", "image", sys.executable], limit_s)
    if ok:
        _, size = run(["docker", "image", "inspect", "-f", "{{.Size}}", "hpcgpu-demo"])
        script = f"cat > eight.py << 'END'\n{EIGHT_PY}END\n{EIGHT}"
        ok, lines = run(["docker", "run", "--rm", "--network", "none", "hpcgpu-demo", "bash", "-c", script])
        lines = [f"{int(size[0]) // 10**6} MB", *lines]
    return ok, lines


def main() -> int:
    """Try the channels of these names, or all; the exit code is how many failed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="CHANNEL")
    parser.add_argument("--limit", type=int, default=LIMIT_S, metavar="SECONDS", help="for each; default: %(default)s")
    names, limit_s = (options := parser.parse_args()).names, options.limit
    tries = {c.name: (c.command, lambda limit_s, c=c: in_container(c, build, limit_s)) for c in CHANNELS}
    tries |= {"Spack": ("spack dev-build py-hpcgpu@0.1.0a2", spack), "OCI image": ("make image", image)}
    if unknown := [name for name in names if name not in tries]:
        parser.error(f"no such channel: {', '.join(unknown)}; there are {', '.join(tries)}")
    write(build := Path(tempfile.mkdtemp()))
    failed = 0
    print("| channel | command | size | result | seconds |\n|---|---|---|---|---|", flush=True)
    for name, (command, attempt) in tries.items():
        if names and name not in names:
            continue
        start = time.monotonic()
        ok, lines = attempt(limit_s)
        lines = lines or ["-", "printed nothing"]
        size, result = (lines[0], lines[-1]) if ok else ("-", "failed: " + " ".join(lines[-4:]))
        failed += not ok
        print(f"| {name} | `{command}` | {size} | {result} | {time.monotonic() - start:.0f} |", flush=True)
    shutil.rmtree(build)
    return failed


if __name__ == "__main__":
    sys.exit(main())
