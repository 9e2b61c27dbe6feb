#!/usr/bin/env bash
# The Debian packages that the tests use: installs those that are missing and says which. SYSTEM_DEPS=0: installs none.
# Never fails: where a package cannot be had, the tests that need it are skipped and say so.
set -u

say() { echo "system packages: $*"; }
installed() { dpkg-query -W -f '${Status}' "$1" 2> /dev/null | grep -q ' installed$'; }

[ "${SYSTEM_DEPS:-1}" != 0 ] || { say "SYSTEM_DEPS=0, nothing installed"; exit 0; }
command -v apt-get > /dev/null && command -v dpkg-query > /dev/null || { say "not a Debian, nothing installed"; exit 0; }

wanted=(hwloc-nox libjemalloc2 tcsh)
command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null || wanted+=(chromium)
command -v ruby > /dev/null || wanted+=(ruby)
command -v gcc > /dev/null || wanted+=(gcc libc6-dev)
command -v g++ > /dev/null || wanted+=(g++)
# Debian's own Python has its headers in a package of their own
[ "$(command -v python3)" != /usr/bin/python3 ] || wanted+=(python3-dev)
if command -v docker > /dev/null; then
  docker compose version > /dev/null 2>&1 || command -v docker-compose > /dev/null || wanted+=(docker-compose)
  for debian in ${DEBIANS:-${DEBIAN:-bookworm}}; do
    docker image inspect "debian:$debian-slim" > /dev/null 2>&1 || { wanted+=(debootstrap); break; }
  done
fi
missing=()
for package in "${wanted[@]}"; do installed "$package" || missing+=("$package"); done
[ ${#missing[@]} -gt 0 ] || { say "all here (${wanted[*]})"; exit 0; }
[ "$(id -u)" = 0 ] || { say "missing ${missing[*]}; not root, nothing installed"; exit 0; }

say "installing ${missing[*]} with apt-get"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() { DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -y --no-install-recommends "${missing[@]}" > "$log" 2>&1; }
# The package lists may be missing or old: fetch them only then.
install || { timeout 300 apt-get update > "$log" 2>&1 && install; } || {
  say "could not be installed:"
  tail -n 15 "$log"
}
