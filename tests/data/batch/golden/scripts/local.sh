#!/bin/bash

trap 'echo $? > /scratch/user1/logs/exit' EXIT
trap 'exit 143' TERM
module load cuda
export UCX_LOG_LEVEL=warn
trap : TERM
/opt/env/bin/hpcgpu launch --document '{"shape": "gang", "what": "it'"'"'s $HOME"}'
