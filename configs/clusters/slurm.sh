#!/usr/bin/env bash
# A Ray cluster in a SLURM job, and a run on it. Not yet run at this size. The folder this is submitted from, with the
# environment .venv in it, must be shared by all nodes: sbatch configs/clusters/slurm.sh
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=32 --exclusive
#SBATCH --signal=B:TERM@300
set -euo pipefail
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
umask 077
export RAY_AUTH_TOKEN_PATH="$PWD/.ray_token_$SLURM_JOB_ID"
.venv/bin/python -c "import secrets; print(secrets.token_hex(32), end='')" > "$RAY_AUTH_TOKEN_PATH"
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  .venv/bin/ray start --head --block --node-ip-address="$address" --port=6379 --dashboard-host=127.0.0.1 &
until (exec 3<>"/dev/tcp/$address/6379") 2> /dev/null; do sleep 1; done  # the head answers
if ((SLURM_NNODES > 1)); then
  srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$head" --overlap \
    .venv/bin/ray start --block --address="$address:6379" &
fi

# On the head node, whose `wait` lets SIGTERM through: the run then saves last.ckpt and says how to resume.
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap .venv/bin/lit-async-rl train \
  --config configs/gsm8k_grpo.yaml --config configs/strategies/fsdp2.yaml --config configs/ray.yaml \
  --trainer.strategy.init_args.data_parallel_size 24 --cluster.address "$address:6379" --cluster.trainer_ranks 24 \
  --cluster.engines.replicas 8 --cluster.engines.resources '{"CPU": 2, "GPU": 1}' &
run=$!
trap 'kill -TERM $run; wait $run; rm -f "$RAY_AUTH_TOKEN_PATH"' TERM
wait $run
