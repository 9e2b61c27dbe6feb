#!/bin/bash
#SBATCH --job-name=hpcgpu
#SBATCH --output=slurm-%j.out
#SBATCH --partition=acc_ehpc
#SBATCH --account=proj
#SBATCH --time=00:15:00
#SBATCH --signal=B:USR1@120
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4

trap 'exit 143' TERM
trap : USR1
export OMPI_MCA_pml=ucx OMPI_MCA_mtl=^ofi OMPI_MCA_btl=^ofi
