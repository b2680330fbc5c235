#!/usr/bin/env bash
# Trains a small language model whose parameters and optimizer state are on NVMe, on a fresh machine with python >= 3.11.
# Then it kills such a training in the middle of a step, resumes it, and compares the weights bit for bit.
# Arguments go to tools/train.py, e.g.: bash tools/demo.sh --model 1b --host-memory-budget 2GB --nvme-path /mnt/nvme
# or, if --larger-than-ram is the first of them, to tools/kill_and_resume.py alone.
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."
# shellcheck source=tools/environment.sh
. tools/environment.sh
make_environment hf,plot
root=$PWD
cd "$here" # paths among the arguments mean what they mean to the caller
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY-passive} # threads that spin while they wait hold up each other on a busy machine
run() {
    "$root/.venv/bin/python" "$root/tools/$1" "${@:2}"
}
if [ "${1:-}" = --larger-than-ram ]; then
    run kill_and_resume.py "$@"
    exit
fi
run train.py --run-log train_log "$@"
case " $* " in
    *" --help "* | *" -h "*) exit ;;
esac
"$root/.venv/bin/infinity" report train_log --out train.html
case " $* " in
    *" --model"*) printf 'To kill and resume this model as well: python tools/kill_and_resume.py %s\n' "$*" ;;
    *) run kill_and_resume.py "$@" ;;
esac
