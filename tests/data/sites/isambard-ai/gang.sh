#!/bin/bash
#SBATCH --job-name=hpcgpu
#SBATCH --output=slurm-%j.out
#SBATCH --partition=workq
#SBATCH --account=proj
#SBATCH --time=00:15:00
#SBATCH --signal=B:USR1@120
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=72
#SBATCH --gres=gpu:4

trap 'exit 143' TERM
trap : USR1
