#!/usr/bin/env bash
# All that wants a GPU, in one command: scripts/gpu.py says what. The Python: $PYTHON, else the checkout's own
# environment, else the machine's.
set -eu
cd "$(dirname "$0")/.."
[ ! -e .venv/.installed ] || own=.venv/bin/python
exec "${PYTHON:-${own:-python3}}" scripts/gpu.py "$@"
