#!/usr/bin/env bash
# Packages, tried where they are to be installed. It costs minutes, and so is no part of make test.
# usage: scripts/packaging.sh image|oldest|release PYTHON
#   image   hpcgpu-demo: the wheel in a bare Debian without a compiler; then the demo in it, without a network
#   oldest  the lowest versions that pyproject.toml allows, in build/oldest, with uv; then the demo and tests/unit
#   release build/release: sdist and wheel, the same twice; versions of all packages per Python; a bill of materials
set -euo pipefail
cd "$(dirname "$0")/.."
# Absolute, since release changes the folder; a link stays one: a venv is where the name of its Python is.
given=${2:-.venv/bin/python}
python=$(command -v "$given") || { echo "$0: no Python '$given'; .venv/bin/python comes by make .venv/.installed" >&2; exit 1; }
python=$(realpath -s "$python")

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

# What a person uploads, and no more: nothing leaves this machine. The tag is made first, so that what is built is in git.
release() {
  local uv=("$python" -m uv) here=build/release version name
  version=$("$python" -m hatchling version)
  [ -z "$(git status --porcelain)" ] || { echo "release: the checkout has changes that are not committed (git status)" >&2; exit 1; }
  grep -q "^## \\[$version\\] - [0-9-]*\$" CHANGELOG.md ||
    { echo "release: CHANGELOG.md has no section '## [$version] - DATE'; hpcgpu/__init__.py has this version" >&2; exit 1; }
  rm -rf "$here"
  SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
  export SOURCE_DATE_EPOCH
  # The second time from the sdist alone, with another umask: files of the checkout that the sdist lacks would be missed.
  "$python" -m hatchling build -d "$here" > /dev/null
  mkdir -p "$here/again"
  tar -C "$here/again" -xzf "$here/hpcgpu-$version.tar.gz"
  (umask 077 && cd "$here/again/hpcgpu-$version" && "$python" -m hatchling build -d .. > /dev/null)
  for name in "hpcgpu-$version.tar.gz" "hpcgpu-$version-py3-none-any.whl"; do
    cmp "$here/$name" "$here/again/$name"
  done
  rm -rf "$here/again"
  "${uv[@]}" tool run --quiet twine check --strict "$here"/*.whl "$here"/*.tar.gz
  for name in 3.11 3.12 3.13 3.14; do
    "${uv[@]}" pip compile --quiet --no-header --python-version "$name" --generate-hashes --only-binary :all: \
      -c constraints.txt --extra mpi-runtime --extra dashboard pyproject.toml -o "$here/python-$name.lock" > /dev/null
  done
  # Installed by its own lock, with hashes: what the bill of materials lists, and the demo runs on.
  "${uv[@]}" venv --quiet --clear --python "$python" "$here/venv"
  name=$("$here/venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "${uv[@]}" pip install --quiet --python "$here/venv/bin/python" --require-hashes -r "$here/python-$name.lock"
  "${uv[@]}" pip install --quiet --python "$here/venv/bin/python" --no-deps "$here/hpcgpu-$version-py3-none-any.whl"
  (cd "$here" && venv/bin/hpcgpu version && venv/bin/hpcgpu demo)
  "${uv[@]}" tool run --quiet --from cyclonedx-bom cyclonedx-py environment --output-reproducible \
    --pyproject pyproject.toml -o "$here/hpcgpu-$version.cdx.json" "$here/venv/bin/python"
  rm -rf "$here/venv"
  (cd "$here" && sha256sum -- * | tee SHA256SUMS)
}

case "${1:-}" in
  image | oldest | release) "$1" ;;
  *) sed -n 's/^# usage: //p' "$0" >&2; exit 2 ;;
esac
