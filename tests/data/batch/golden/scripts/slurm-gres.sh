#!/bin/bash
#SBATCH --job-name=svd
#SBATCH --output=/scratch/user1/logs/slurm-%j.out
#SBATCH --partition=gpu
#SBATCH --account=proj
#SBATCH --time=02:00:00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:a100:4
#SBATCH --mem=204800M

trap 'echo $? > /scratch/user1/logs/exit' EXIT
trap 'exit 143' TERM
module load cuda
export UCX_LOG_LEVEL=warn
trap : TERM
/opt/env/bin/hpcgpu launch --document '{"shape": "gang", "what": "it'"'"'s $HOME"}'
