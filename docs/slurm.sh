#!/usr/bin/env bash
# Training on 2 nodes with 8 GPUs each: sbatch docs/slurm.sh SHARDS OUT
#
# Two minutes before the time limit, Slurm sends SIGTERM to this shell (--signal=B:), which passes it
# on. Before a preemption, Slurm sends SIGTERM to the processes itself. The loop then saves the state
# after its last optimizer step and ends. The requeued job runs this script again and continues from
# there. All nodes must see SHARDS and OUT: use a shared folder or s3://.
#SBATCH --job-name=mmstream
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

shards=$1
out=$2
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# torchrun kills what has not saved so many seconds after SIGTERM. Its own default is 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}"

# Each restart gets a new store. In a shared one, ranks may find addresses of processes that are gone.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

srun torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "${GPUS_PER_NODE:-8}" \
    --max-restarts "${MAX_RESTARTS:-3}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head_node:${RDZV_PORT:-29500}" \
    --rdzv-id "$SLURM_JOB_ID" \
    -m mmstream train "$shards" --out "$out" ${TRAIN_OPTIONS:---epochs 10 --num-workers 7} &
steps=$!

stopped=
stop() {
    # At a second SIGTERM, torchrun would leave its processes behind, which are saving.
    [ -n "$stopped" ] || kill -TERM "$steps" # srun passes it on to all nodes
    stopped=1
}
trap stop TERM

code=0
wait "$steps" || code=$?
if [ -n "$stopped" ]; then
    while kill -0 "$steps" 2> /dev/null; do
        wait "$steps" || true # each signal ends a wait; the loop ends when all is saved
    done
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
