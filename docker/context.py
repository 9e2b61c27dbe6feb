"""Write the build context of the lab's image: ``python3 docker/context.py FOLDER`` prints its fingerprint.

The context is a folder outside the checkout, because it holds what must never be committed: CAs and pip settings.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

DOCKER = Path(__file__).parent
ROOT = DOCKER.parent
HOST_CAS = Path("/usr/local/share/ca-certificates")
# What of a host's pip settings also makes sense in a container: where packages come from and how patiently.
PIP_KEYS = {"index-url", "extra-index-url", "trusted-host", "proxy", "default-timeout", "timeout", "retries"}


def read_pip_settings(text: str) -> dict[str, str]:
    """Read ``pip config list``; a variable of the environment wins over a file, as in pip."""
    settings: dict[str, str] = {}
    for source in ("global.", "install.", ":env:."):
        for line in text.splitlines():
            name, _, value = line.partition("=")
            key = name.removeprefix(source)
            if name.startswith(source) and key in PIP_KEYS:
                settings[key] = value.strip().strip("'\"").replace("\\n", "\n    ")
    return settings


def pip_conf() -> str:
    """Render the pip.conf of the build from the settings that pip has here."""
    venv = ROOT / ".venv/bin/python"
    python = str(venv) if venv.exists() else sys.executable
    out = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60)
    settings = read_pip_settings(out.stdout)
    return "\n".join(["[global]", *(f"{key} = {value}" for key, value in settings.items())]) + "\n"


def cas() -> list[Path]:
    """Certificates that the build trusts beside Debian's: given, put into extra-ca, or trusted by this host."""
    given = os.environ.get("CA_FILE")
    if given and not Path(given).is_file():
        sys.exit(f"CA_FILE={given}: no such file. Give the path of a CA certificate (PEM).")
    return [*([Path(given)] if given else []), *sorted(DOCKER.glob("extra-ca/*.crt")), *sorted(HOST_CAS.rglob("*.crt"))]


def write_context(folder: Path) -> str:
    """Fill the folder and return a fingerprint of all that ends up in the image and its volumes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["dashboard"]]
    build = folder / "build"
    build.mkdir(mode=0o700)
    shutil.copy(DOCKER / "Dockerfile", folder)
    shutil.copy(DOCKER / "packages.sh", build)
    shutil.copy(ROOT / "constraints.txt", build)
    (build / "requirements.txt").write_text("\n".join(needs) + "\n")
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    (build / "pip.conf").write_text(pip_conf())
    for number, ca in enumerate(cas()):
        shutil.copyfile(ca, build / f"{number}-{ca.stem}.crt")
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(write_context(Path(sys.argv[1])))
