#!/bin/bash
#PBS -N hpcgpu
#PBS -l select=2:ncpus=4:mpiprocs=1:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -k doe

cd -- "${PBS_O_WORKDIR:-.}" || echo "this job goes on in $PWD" >&2
# A script in an Apptainer image.
# usage: IMAGE=my.sif SCRIPT=my_script.py ARGS='its arguments, split at blanks' qsub [its options] -v IMAGE,SCRIPT,ARGS jobscripts/pbs-apptainer.sh
# The image has Python, hpcgpu and what the script imports. Each node has one rank, with all its GPUs' workers.
# The ranks meet by files: no MPI of the image must fit this machine's.
# A bare mpiexec would tie each rank to one core, and its workers would share that: Open MPI 4, and 5.
export OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none
# mpiprocs=1 makes it one line for each node.
nodes=$(wc -l < "$PBS_NODEFILE")
: "${IMAGE:?say which: qsub -v IMAGE=my.sif,...}"
: "${SCRIPT:?say which: qsub -v SCRIPT=my_script.py ...}"
read -ra arguments <<< "${ARGS-}"
mpiexec --hostfile "$PBS_NODEFILE" -n "$nodes" apptainer exec --nv "$IMAGE" \
    hpcgpu run --rendezvous file "$SCRIPT" "${arguments[@]}"
