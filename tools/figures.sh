#!/usr/bin/env bash
# Takes the figures of docs/benchmarks.md again, one after the other, and writes a JSON file for each.
#
#   bash tools/figures.sh OUT [--nvme-path DIR] [--peer-python DS/bin/python]
#
# Needs root, for control groups. On two cores it takes an hour and a half, and DeepSpeed first compiles for some minutes.
# Without --peer-python, DeepSpeed is left out. bench_experts.py runs DeepSpeed in its own process: that environment needs
# the packages of pyproject.toml as well.
set -uo pipefail
tools="$(cd "$(dirname "$0")" && pwd)"
export PYTHONPATH="$tools/.." HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=passive
[ "${1:---help}" = --help ] && sed -n "2,/^set/{/^#/s/^# \\?//p}" "$0" && exit
out="$1"
shift
drive="$PWD" peer=() peer_python=""
while [ $# -gt 0 ]; do
    case "$1" in
        --nvme-path) drive="$2" ;;
        --peer-python) peer=(--peer deepspeed --peer-python "$2" --peer-build-dir "$drive/peer-build") peer_python="$2" ;;
        *) echo "unknown option: $1" && exit 2 ;;
    esac
    shift 2
done
mkdir -p "$out"
git -C "$tools" describe --always --dirty > "$out/commit"
failed=0

# take NAME PYTHON SCRIPT OPTION...
take() {
    local name="$1" python="$2" script="$3"
    shift 3
    echo "== $name: python tools/$script $*"
    "$python" "$tools/$script" "$@" --nvme-path "$drive" --json "$out/$name.json" || failed=1
}

step() { take "$1" python bench_step.py "${@:2}"; }
experts() { take "$1" "$2" bench_experts.py "${@:3}"; }

step one-micro-batch --throttle 300,600,1200 --turns 1 --warmup-steps 1
alone=(--throttle 600 --seq-len 64 --warmup-steps 1 --turns 2 --without-compute-alone)
step half-in-memory "${alone[@]}" --budget 2.6GB
step clipping "${alone[@]}" --clip 1
step clipping-gradients-in-memory "${alone[@]}" --clip 1 --budget 1.2GB
step beside-deepspeed --throttle 600 --seq-len 64 --micro-batches 1,8 --warmup-steps 1 --turns 1 \
    --without-compute-alone "${peer[@]}"
step as-much-memory "${alone[@]}" --budget 6GB
step eight-micro-batches --throttle 300,600,1200 --seq-len 64 --micro-batches 8 --warmup-steps 2 --turns 1
step in-memory --throttle none --budget 10GB --clip 0,1 --turns 3 --warmup-steps 2
step memory-limit --throttle none --memory-limit 1.5GB --checkpointing non-reentrant --micro-batches 1,3 --clip 0,1 \
    --turns 1 --steps-per-turn 1 --without-compute-alone
small=(--layers 6 --width 512 --inner 256 --steps 1 --warm-up 1)
experts experts-one-token python "${small[@]}" --throttle 10 --budget 16MiB --budget-whole 118MiB
experts experts-512-tokens python "${small[@]}" --throttle 10 --layers 3 --budget 24MiB --tokens 512 --ways by_expert
experts experts python --throttle 300
experts experts-least-memory python --throttle 300 --budget 32MiB --ways by_expert
if [ -n "$peer_python" ]; then
    experts experts-beside-deepspeed "$peer_python" --throttle 300 --ways by_expert,deepspeed --steps 3
fi
take largest-model python bench_scale.py --limit 4GiB --model 100m "${peer[@]}" --png "$out/scale.png"
exit "$failed"
