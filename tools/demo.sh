#!/usr/bin/env bash
# Trains a small language model whose parameters and optimizer state lie on NVMe, on a fresh machine with python >= 3.11.
# Arguments go to tools/train.py, e.g.: bash tools/demo.sh --model 1b --host-memory-budget 2GB --nvme-path /mnt/nvme
# or, if --larger-than-ram is the first of them, to tools/larger_than_ram.py.
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."
# shellcheck source=tools/environment.sh
. tools/environment.sh
make_environment hf,plot
root=$PWD
cd "$here" # paths among the arguments mean what they mean to the caller
script=train.py
[ "${1:-}" != --larger-than-ram ] || script=larger_than_ram.py
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY-passive} # threads that spin while they wait hold up each other on a busy machine
exec "$root/.venv/bin/python" "$root/tools/$script" "$@"
