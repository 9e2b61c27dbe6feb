#!/usr/bin/env bash
# Packages, tried where they are to be installed. It costs minutes, and so is no part of make test.
# usage: scripts/packaging.sh image|oldest PYTHON
#   image   hpcgpu-demo: the wheel in a bare Debian without a compiler; then the demo in it, without a network
#   oldest  the lowest versions that pyproject.toml allows, in build/oldest, with uv; then the demo and tests/unit
set -euo pipefail
cd "$(dirname "$0")/.."
python=${2:-.venv/bin/python}

image() {
  local args=() name
  context=$(mktemp -d)
  trap 'rm -rf "$context"' EXIT # not local: it is read at the end
  "$python" -m hatchling build -t wheel -d "$context" > /dev/null
  cp constraints.txt docker/demo.Dockerfile "$context"
  "$python" - "$context" << 'END'
import pathlib, shutil, sys
sys.path.insert(0, "docker")
import context
folder = pathlib.Path(sys.argv[1])
(folder / "pip.conf").write_text(context.pip_conf())
for number, ca in enumerate(context.cas()):
    shutil.copyfile(ca, folder / f"{number}-{ca.stem}.crt")
END
  for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    [ -z "${!name:-}" ] || args+=("--build-arg=$name")
  done
  if [ -z "${http_proxy:-}" ] && command -v apt-config > /dev/null; then
    name=$(apt-config dump --format '%v%n' Acquire::http::Proxy)
    [ -z "$name" ] || args+=("--build-arg=http_proxy=$name")
  fi
  docker build --force-rm --network host "${args[@]}" -f "$context/demo.Dockerfile" -t hpcgpu-demo "$context"
  docker run --rm --network none hpcgpu-demo
}

oldest() {
  local uv=("$python" -m uv) there=build/oldest/bin/python
  "${uv[@]}" venv --quiet --clear --python "$python" build/oldest
  "${uv[@]}" pip install --quiet --python "$there" --only-binary :all: --resolution lowest-direct -r pyproject.toml
  "${uv[@]}" pip freeze --python "$there" > build/oldest/lowest.txt
  # pyarrow of the tests: later ones want NumPy 2
  "${uv[@]}" pip install --quiet --python "$there" -c build/oldest/lowest.txt -e '.[dev]' 'pyarrow<20'
  sed 's/^/  /' build/oldest/lowest.txt
  (cd build/oldest && bin/hpcgpu demo)
  "$there" -m pytest -q -n 2 -p no:cacheprovider tests/unit
}

case "${1:-}" in
  image | oldest) "$1" ;;
  *) sed -n 's/^# usage: //p' "$0" >&2; exit 2 ;;
esac
