#!/usr/bin/env bash
#SBATCH --job-name=treadle
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Submit it from the clone, which lies on a disk that all nodes see: sbatch docs/cluster/slurm.sh
set -euo pipefail

# shellcheck source=/dev/null
source .venv/bin/activate
export RAY_USAGE_STATS_ENABLED=0
port=6379
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
read -r address _ < <(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address)

# Ray lives as long as these steps do, and they end with the job.
srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap \
  ray start --head --node-ip-address="$address" --port="$port" --block &
until timeout 1 bash -c "</dev/tcp/$address/$port" 2>/dev/null; do sleep 1; done
if ((${#nodes[@]} > 1)); then
  others=$(IFS=,; echo "${nodes[*]:1}")
  srun --nodes="$((${#nodes[@]} - 1))" --ntasks="$((${#nodes[@]} - 1))" --nodelist="$others" --overlap \
    ray start --address="$address:$port" --block &
fi
until python - "$address:$port" "${#nodes[@]}" <<'END'
import sys
import ray

ray.init(sys.argv[1], logging_level="error")
sys.exit(sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]))
END
do sleep 2; done

# The same command goes on where a job of earlier stands.
treadle train docs/cluster/train.yaml controller.address="$address:$port" run.dir=runs/cluster
