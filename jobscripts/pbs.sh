#!/bin/bash
#PBS -N hpcgpu
#PBS -l select=2:ncpus=4:mpiprocs=4:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -k doe

cd -- "${PBS_O_WORKDIR:-.}" || echo "this job goes on in $PWD" >&2
# A script on the GPUs of two nodes.
# usage: SCRIPT=my_script.py ARGS='its arguments, split at blanks' qsub [its options] -v SCRIPT,ARGS jobscripts/pbs.sh
# Change what stands above as your site wants it: partition or queue, account, time, nodes, GPUs.
# Python, hpcgpu and an MPI library must be found here: load modules or activate an environment, if need be.
: "${SCRIPT:?say which: qsub -v SCRIPT=my_script.py ...}"
read -ra arguments <<< "${ARGS-}"
hpcgpu launch "$SCRIPT" "${arguments[@]}"
