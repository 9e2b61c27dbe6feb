#!/bin/bash
#PBS -N hpcgpu
#PBS -l select=1:ncpus=4:mpiprocs=4:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -k doe

cd -- "${PBS_O_WORKDIR:-.}" || echo "this job goes on in $PWD" >&2
# Independent runs, each a job of one node.
# usage: qsub -J 1-4 [more options] -v RUNS=runs.txt,SCRIPT=my_script.py jobscripts/pbs-array.sh
# Each element is a run of its own, on its own node. Its arguments are a line of the file, split at blanks.
# Change what stands above as your site wants it: partition or queue, account, time, nodes, GPUs.
# Python, hpcgpu and an MPI library must be found here: load modules or activate an environment, if need be.
runs=${RUNS:?say which file has the arguments of the runs, one line each: qsub -v RUNS=runs.txt,...}
run=${PBS_ARRAY_INDEX:?no element of an array; submit it as: qsub -J 1-4 ...}
read -ra arguments <<< "$(sed -n "${run}p" "$runs")"
[ "${#arguments[@]}" -gt 0 ] || { echo "line $run of $runs has no arguments for this run" >&2; exit 2; }
hpcgpu launch "${SCRIPT:?say which: qsub -v SCRIPT=my_script.py,...}" "${arguments[@]}"
