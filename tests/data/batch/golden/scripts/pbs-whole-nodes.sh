#!/bin/bash
#PBS -N svd
#PBS -q gpu
#PBS -A proj
#PBS -l select=2:ncpus=32:mem=204800mb:system=polaris
#PBS -l place=scatter
#PBS -l walltime=02:00:00
#PBS -j oe
#PBS -o /scratch/user1/logs/

cd -- "${PBS_O_WORKDIR:-.}"
trap 'echo $? > /scratch/user1/logs/exit' EXIT
trap 'exit 143' TERM
module load cuda
export UCX_LOG_LEVEL=warn
trap : TERM
/opt/env/bin/hpcgpu launch --document '{"shape": "gang", "what": "it'"'"'s $HOME"}'
