#!/bin/bash
#PBS -N hpcgpu
#PBS -q gpuvolta
#PBS -P proj
#PBS -l ncpus=48
#PBS -l ngpus=4
#PBS -l mem=364304mb
#PBS -l jobfs=100GB
#PBS -l walltime=00:15:00
#PBS -j oe
#PBS -k doe

cd -- "${PBS_O_WORKDIR:-.}" || echo "this job goes on in $PWD" >&2
trap 'exit 143' TERM
trap : USR1
