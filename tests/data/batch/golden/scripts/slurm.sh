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

rm -f /scratch/user1/logs/exit
trap 'code=$?; umask 77; echo $code > /scratch/user1/logs/exit' EXIT
trap 'exit 143' TERM
trap : USR1
module load cuda
{
    exec {out}>&1
    job= warned=
    trap : TERM
    trap 'warned=1; kill -USR1 $job 2>/dev/null || :' USR1
    exec {told}< <(
        trap : TERM USR1
        (
            trap '' USR1
            echo "$BASHPID"
            exec /opt/env/bin/hpcgpu launch --document '{"shape": "gang", "what": "it'"'"'s $HOME"}' >&"$out" {out}>&-
        ) && echo 0 || echo "$?"
    )
    exec {out}>&-
    read -r job <&$told
    [ -z "$warned" ] || kill -USR1 "$job" 2>/dev/null || :
    code=
    until read -r -t 5 part <&$told; ended=$?; code+=$part; ((ended <= 128)); do :; done
    exit "${code:-137}"
}
