#!/usr/bin/env bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
# sbatch configs/slurm.sh --config configs/gsm8k_qwen2.5_7b_8xa100.yaml [more of `train.py fit`]
# Five minutes before its time is up, the run saves and ends with code 75; the job then comes again and goes on.
code=0
srun python train.py fit "$@" --ckpt_path last \
    --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" || code=$?
[ "$code" -ne 75 ] || exec scontrol requeue "$SLURM_JOB_ID"
exit "$code"
