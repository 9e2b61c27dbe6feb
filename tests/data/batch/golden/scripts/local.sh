#!/bin/bash

trap 'echo $? > /scratch/user1/logs/exit' EXIT
trap 'exit 143' TERM
trap : USR1
module load cuda
export UCX_LOG_LEVEL=warn
{
    (trap '' USR1; exec /opt/env/bin/hpcgpu launch --document '{"shape": "gang", "what": "it'"'"'s $HOME"}') <&0 &
    job=$!
    trap '' TERM
    trap 'again=1; kill -USR1 "$job" 2>/dev/null || :' USR1
    while again=; wait "$job"; code=$?; [ "$again" ]; do :; done
    exit "$code"
}
