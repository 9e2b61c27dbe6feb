#!/usr/bin/env bash
# distributed_tests.sh FOLDER [WORDS FOR PYTEST]: distributed's own tests without and with the spill store.
# FOLDER is distributed/tests, or another folder of tests, in its sources, of the installed version: wheels have none.
# Prints what fails with the store alone; STORE=jit and LIMIT=64KiB try more of it.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
folder=$(cd "$1" && pwd)
sources=$(dirname "$folder")
while [ ! -e "$sources/scheduler.py" ]; do sources=$(dirname "$sources"); done
shift
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
with=${STORE:-whole}
for store in none "$with"; do
    (cd "$folder" && STORE=$store SOURCES="$sources" PYTHONPATH="$here/scripts" "${PYTHON:-python3}" -m pytest -q -c /dev/null \
        --rootdir "$folder" -p store_in_workers -p no:cacheprovider -W ignore --timeout 60 --tb=line -rfE \
        -n "${WORKERS:-2}" "${@:-.}" > "$out/$store.log") || true
    grep -E '^(FAILED|ERROR) .*::' "$out/$store.log" | sed 's/ - .*//; s/^[A-Z]* //' | sort -u > "$out/$store.failed" || true
    echo "$store: $(tail -1 "$out/$store.log")"
done
comm -13 "$out/none.failed" "$out/$with.failed"
