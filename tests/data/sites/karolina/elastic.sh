#!/bin/bash
#SBATCH --job-name=hpcgpu
#SBATCH --output=slurm-%j.out
#SBATCH --partition=qgpu
#SBATCH --account=proj
#SBATCH --time=00:15:00
#SBATCH --signal=B:USR1@120
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8

trap 'exit 143' TERM
trap : USR1
