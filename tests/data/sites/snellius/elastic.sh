#!/bin/bash
#SBATCH --job-name=hpcgpu
#SBATCH --output=slurm-%j.out
#SBATCH --partition=gpu_a100
#SBATCH --account=proj
#SBATCH --time=00:15:00
#SBATCH --signal=B:USR1@120
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=18
#SBATCH --gpus-per-node=4
#SBATCH --mem=491520M

trap 'exit 143' TERM
trap : USR1
