#!/usr/bin/env bash
# One machine with several GPUs: fold a model, then distil it. Run it with bash. After any stop the same command resumes.
set -euo pipefail

# Edit these.
MODEL=${MODEL:-meta-llama/Llama-3.2-1B}
TARGET=${TARGET:---to mla --kv-budget 25%}
FOLDED=${FOLDED:-out/llama-3.2-1b-mla}           # the recipe's `student`
RECIPE=${RECIPE:-recipes/llama-3.2-1b-mla.yaml}
PROFILE=${PROFILE:-fsdp2}                        # ddp if student, teacher and optimizer fit on one GPU
PROCESSES=${PROCESSES:-8}                        # one per GPU

if [ ! -e "$FOLDED" ]; then
  # shellcheck disable=SC2086  # TARGET is several words
  torchrun --nproc_per_node "$PROCESSES" -m kvfold convert "$MODEL" $TARGET --out "$FOLDED"
fi
exec kvfold distill "$RECIPE" --profile "$PROFILE" -- --num_processes "$PROCESSES"
