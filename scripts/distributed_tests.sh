#!/usr/bin/env bash
# distributed_tests.sh PARTS FOLDER [WORDS FOR PYTEST]: distributed's own tests without and with parts of hpcgpu.
# PARTS: whole, jit (the spill store; LIMIT=64KiB tries more of it), near, far (connections),
# paced (removals of workers), several with commas.
# FOLDER is distributed/tests, or another folder of tests, in its sources, of the installed version: wheels have none.
# Prints what fails with a part alone.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
IFS=, read -ra parts <<< "$1"
folder=$(cd "$2" && pwd)
sources=$(dirname "$folder")
while [ ! -e "$sources/scheduler.py" ]; do sources=$(dirname "$sources"); done
shift 2
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for part in none "${parts[@]}"; do
    (cd "$folder" && TRY=$part SOURCES="$sources" PYTHONPATH="$here/scripts" "${PYTHON:-python3}" -m pytest -q -c /dev/null \
        --rootdir "$folder" -p hpcgpu_in_tests -p no:cacheprovider -W ignore --timeout "${TIMEOUT_S:-60}" --tb=line -rfE \
        -n "${WORKERS:-2}" "${@:-.}" > "$out/$part.log") || true
    grep -E '^(FAILED|ERROR) .*::' "$out/$part.log" | sed 's/ - .*//; s/^[A-Z]* //' | sort -u > "$out/$part.failed" || true
    echo "$part: $(tail -1 "$out/$part.log")"
    comm -13 "$out/none.failed" "$out/$part.failed"
done
