#!/bin/bash
#PBS -N hpcgpu
#PBS -q casper
#PBS -A proj
#PBS -l select=1:ncpus=128:mpiprocs=4:ngpus=4:mem=827790mb:gpu_type=a100
#PBS -l place=scatter
#PBS -l walltime=00:15:00
#PBS -j oe
#PBS -k doe

cd -- "${PBS_O_WORKDIR:-.}" || echo "this job goes on in $PWD" >&2
trap 'exit 143' TERM
trap : USR1
