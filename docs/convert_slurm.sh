#!/usr/bin/env bash
# A conversion on many nodes, as a Slurm array: bash docs/convert_slurm.sh ROWS DEST NUM_TASKS
#
# Each task of the array writes SHARDS_PER_TASK shards. Choose NUM_TASKS so that they cover all
# shards; numbers behind the last shard are no error. A task that died runs again by the same
# command. The last job makes the dataset, when all tasks have ended well.
# All nodes must see ROWS, the media and DEST: use a shared folder or s3://.
set -euo pipefail

rows=$1
dest=$2
num_tasks=$3
per_task=${SHARDS_PER_TASK:-100}

# Options that change the output must be the same for all tasks.
options=${CONVERT_OPTIONS:-}

convert="first=\$((SLURM_ARRAY_TASK_ID * $per_task))
mmstream convert '$rows' '$dest' $options --shard-range \$first:\$((first + $per_task))"

array=$(sbatch --parsable --array="0-$((num_tasks - 1))" --cpus-per-task=16 --requeue \
    --job-name=mmstream-convert --wrap "$convert")
sbatch --dependency="afterok:$array" --job-name=mmstream-finalize \
    --wrap "mmstream finalize '$dest' ${FINALIZE_OPTIONS:-}"
