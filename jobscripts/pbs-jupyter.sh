#!/bin/bash
#PBS -N hpcgpu
#PBS -l select=2:ncpus=4:mpiprocs=4:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -k doe

cd -- "${PBS_O_WORKDIR:-.}" || echo "this job goes on in $PWD" >&2
# A Jupyter server beside a cluster.
# usage: ARGS='options of hpcgpu launch' qsub [its options] -v ARGS jobscripts/pbs-jupyter.sh
# The log says how to get at the server. In a notebook, with the dashboard's link (a plain Client() has a useless one):
# from distributed import Client; from hpcgpu import GPURunner; client = Client(GPURunner())
# The job ends when the server is shut down.
# Change what stands above as your site wants it: partition or queue, account, time, nodes, GPUs.
# Python, hpcgpu and an MPI library must be found here: load modules or activate an environment, if need be.
read -ra arguments <<< "${ARGS-}"
hpcgpu launch "${arguments[@]}" "$(hpcgpu template --folder)"/notebook_server.py
