#!/bin/bash
#SBATCH --job-name=hpcgpu
#SBATCH --output=slurm-%j.out
#SBATCH --partition=gpuA100x4
#SBATCH --account=proj
#SBATCH --time=00:15:00
#SBATCH --signal=B:USR1@120
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --mem=213624M
#SBATCH --constraint=scratch
#SBATCH --gpu-bind=none

trap 'exit 143' TERM
trap : USR1
