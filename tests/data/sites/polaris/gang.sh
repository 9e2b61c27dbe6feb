#!/bin/bash
#PBS -N hpcgpu
#PBS -q debug
#PBS -A proj
#PBS -l select=2:system=polaris
#PBS -l place=scatter
#PBS -l walltime=00:15:00
#PBS -j oe
#PBS -k doe
#PBS -l filesystems=home:eagle

cd -- "${PBS_O_WORKDIR:-.}" || echo "this job goes on in $PWD" >&2
trap 'exit 143' TERM
trap : USR1
export TMPDIR=/tmp
