#!/bin/bash
#PBS -N hpcgpu
#PBS -l select=2:ncpus=4:mpiprocs=4:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -k doe

cd -- "${PBS_O_WORKDIR:-.}" || echo "this job goes on in $PWD" >&2
# The same, with what most sites ask for and most users want.
# usage: SCRIPT=my_script.py ARGS='its arguments, split at blanks' qsub [its options] -v SCRIPT,ARGS jobscripts/pbs-full.sh
# Options given to qsub win over those here. Others stand there, too, above the first command:
# #PBS -A my_project, #PBS -q gpu, #PBS -l filesystems=home:scratch, #PBS -m ae
# module load cuda openmpi
# source "$HOME/venvs/dask/bin/activate"
# export OMP_NUM_THREADS=1
options=(
    --device-memory-limit 0.8 # of a GPU's memory; above it arrays go to host memory
    --jit-unspill # object by object, each brought back where it is used
    # --memory-limit 100GB # host memory of a worker; its share of the node's if not given
    # --local-directory /scratch/$USER # fast, and of each node: for what no longer fits into host memory
    # --requeue # before its time limit the job asks to be started again: for a script with a checkpoint
    # --site perlmutter # what is known of a machine: hpcgpu launch --help
)
: "${SCRIPT:?say which: qsub -v SCRIPT=my_script.py ...}"
read -ra arguments <<< "${ARGS-}"
hpcgpu launch "${options[@]}" "$SCRIPT" "${arguments[@]}"
