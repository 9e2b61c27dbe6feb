#!/bin/bash
#SBATCH --job-name=svd
#SBATCH --output=/scratch/user1/logs/slurm-%j.out
#SBATCH --partition=gpu
#SBATCH --account=proj
#SBATCH --time=02:00:00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --mem=204800M

trap 'echo $? > /scratch/user1/logs/exit' EXIT
trap 'exit 143' TERM
trap : USR1
module load cuda
export UCX_LOG_LEVEL=warn
{
    (trap '' USR1; exec /opt/env/bin/hpcgpu launch --document '{"shape": "gang", "what": "it'"'"'s $HOME"}') <&0 &
    job=$!
    trap '' TERM
    trap 'again=1; kill -USR1 "$job" 2>/dev/null || :' USR1
    while again=; wait "$job"; code=$?; [ "$again" ]; do :; done
    exit "$code"
}
