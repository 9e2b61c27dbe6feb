#!/bin/bash
#PBS -N svd
#PBS -J 0-15
#PBS -q gpu
#PBS -A proj
#PBS -l select=1:ncpus=32:mpiprocs=4:ngpus=4:mem=204800mb
#PBS -l place=scatter
#PBS -l walltime=02:00:00
#PBS -j oe
#PBS -k doe
#PBS -o /scratch/user1/logs/

cd -- "${PBS_O_WORKDIR:-.}" || echo "this job goes on in $PWD" >&2
rm -f /scratch/user1/logs/exit."$PBS_ARRAY_INDEX"; (umask 77; echo >> /scratch/user1/logs/exit."$PBS_ARRAY_INDEX".starts); export HPCGPU_JOB_RESTARTS=$(($(wc -l < /scratch/user1/logs/exit."$PBS_ARRAY_INDEX".starts) - 1))
trap 'code=$?; umask 77; echo $code > /scratch/user1/logs/exit."$PBS_ARRAY_INDEX"' EXIT
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
