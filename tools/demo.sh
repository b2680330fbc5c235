#!/usr/bin/env bash
# Trains a small language model whose parameters and optimizer state lie on NVMe, on a fresh machine with python >= 3.11.
# Arguments go to tools/train.py, e.g.: bash tools/demo.sh --model 1b --host-memory-budget 2GB --nvme-path /mnt/nvme
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."
# shellcheck source=tools/environment.sh
. tools/environment.sh
make_environment hf,plot
root=$PWD
cd "$here" # paths among the arguments mean what they mean to the caller
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY-passive} # threads that spin while they wait hold up each other on a busy machine
exec "$root/.venv/bin/python" "$root/tools/train.py" "$@"
