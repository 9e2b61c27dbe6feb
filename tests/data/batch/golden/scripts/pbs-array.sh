#!/bin/bash
#PBS -N svd
#PBS -J 0-15
#PBS -q gpu
#PBS -A proj
#PBS -l select=1:ncpus=32:mpiprocs=4:ngpus=4:mem=204800mb
#PBS -l place=scatter
#PBS -l walltime=02:00:00
#PBS -j oe
#PBS -o /scratch/user1/logs/

cd -- "${PBS_O_WORKDIR:-.}"
rm -f /scratch/user1/logs/exit."$PBS_ARRAY_INDEX"; echo >> /scratch/user1/logs/exit."$PBS_ARRAY_INDEX".starts; export HPCGPU_JOB_RESTARTS=$(($(wc -l < /scratch/user1/logs/exit."$PBS_ARRAY_INDEX".starts) - 1))
trap 'echo $? > /scratch/user1/logs/exit."$PBS_ARRAY_INDEX"' EXIT
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
