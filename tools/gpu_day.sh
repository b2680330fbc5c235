#!/usr/bin/env bash
# The day a GPU is there: proves exactness, bounds and bytes on it, measures steps, lists what waits for it, writes a report.
#
#   bash tools/gpu_day.sh [--simulated] [--nvme-path DIR ...] [--out DIR] [SLOT ...]
#
# Each slot ends within ten minutes and can be run alone; without a name all of them run. A slot that fails does not keep the
# others from running; the exit code then is 1. OUT/report.md gathers what all slots so far have printed.
#
#   machine           the machine and its drive, copies to and from the GPU
#   tests             tests/gpu, with all kernels loaded before, but for the grid
#   grid              the exactness grid and all models, with the least device memory
#   blocking          the exactness rows again, where each launch waits for its kernel
#   slow-copies       the exactness rows again, where each copy begins late
#   sanitizer         five exactness rows under torch's CUDA sanitizer, which finds accesses in no order
#   same-bits         1B parameters, deterministic: paged with 8 update workers as in memory with one
#   peer              1B and 3B beside plain torch and DeepSpeed at its best: tools/gpu_peer.py says what has to lie there
#   peer-more         1B with DeepSpeed's other settings
#   train-1b          1B parameters on NVMe, 2 GB of host memory: loss, peaks, bytes, time
#   train-3b          3B parameters, 8 GB of host memory, 6 GB of the GPU's, and a timeline
#   train-8b          8B parameters, 60 GB of host memory
#   train-8b-8        the same with 8 micro-batches in the vertical order
#   update-on-gpu     1B parameters, the optimizer on the GPU, beside plain torch
#   update-workers    1B parameters on NVMe, 2 GB of host memory, with 4 and 8 update workers
#   synchronisations  every place at which a step makes the host wait for the GPU
#
# --nvme-path: several times for several drives. Then train-1b and train-3b run with one and with all of them.
# --simulated: the same slots on the simulated GPU of the tests, with small models. Times mean nothing there.
set -uo pipefail
cd "$(dirname "$0")/.."

all=(machine tests grid blocking slow-copies sanitizer same-bits peer peer-more train-1b train-3b train-8b train-8b-8
    update-on-gpu update-workers synchronisations)
simulated='' out=gpu_day drives=() slots=()
usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
}
while [ $# -gt 0 ]; do
    case $1 in
        --simulated) simulated=--simulated ;;
        --nvme-path | --out)
            [ $# -gt 1 ] || { printf '%s wants a directory\n' "$1" >&2; exit 2; }
            if [ "$1" = --out ]; then out=$2; else drives+=("$2"); fi
            shift
            ;;
        -h | --help) usage; exit 0 ;;
        *)
            [[ " ${all[*]} " == *" $1 "* ]] || { printf 'No slot %s: there are %s\n' "$1" "${all[*]}" >&2; exit 2; }
            slots+=("$1")
            ;;
    esac
    shift
done
[ ${#slots[@]} -gt 0 ] || slots=("${all[@]}")
mkdir -p "$out" || exit 1
[ ${#drives[@]} -gt 0 ] || drives=("$out/states")
mkdir -p "${drives[@]}" || exit 1
all_drives=()
for drive in "${drives[@]}"; do all_drives+=(--nvme-path "$drive"); done

python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3) || { printf 'No python3: name one, PYTHON=/path/to/python\n' >&2; exit 1; }
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
day=("$python" tools/gpu_day.py $simulated --nvme-path "${drives[0]}")
striped=("$python" tools/gpu_day.py $simulated "${all_drives[@]}")
peer=("$python" tools/gpu_peer.py --drives "${drives[@]}")
if [ -z "$simulated" ]; then
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
        printf 'torch sees no GPU here (infinity doctor says more). Without one: bash tools/gpu_day.sh --simulated\n' >&2
        exit 1
    }
    tests=tests/gpu
else
    tests=tests/simulated_gpu
fi
pytest=("$python" -m pytest -q -p no:cacheprovider -p no:benchmark -rfE) # that plugin warns, and warnings are errors
rows=("$tests/test_training.py" -k bits_of_plain_torch)

# The parts of a slot that other slots have as well.
one_and_all() {
    "${day[@]}" train "$@" || return
    if [ ${#drives[@]} -gt 1 ]; then "${striped[@]}" train "$@"; fi
}
peer_runs() {
    if [ -n "$simulated" ]; then
        "${peer[@]}" "$@" --set tiny --only plain ours # of the CPU: what is real of it are the processes and their limits
    else
        "${peer[@]}" "$@"
    fi
}

slot() {
    case $1 in
        machine) "$python" -m infinity doctor --nvme-path "${drives[0]}" || true ;; # its advice is no failure of this slot
        tests) CUDA_MODULE_LOADING=EAGER "${pytest[@]}" "$tests" --ignore tests/gpu/test_grid.py ;;
        grid)
            # The simulated GPU has its rows and models in the slot before.
            if [ -z "$simulated" ]; then "${pytest[@]}" tests/gpu/test_grid.py; fi
            ;;
        same-bits)
            "${day[@]}" same-bits ${simulated:+--steps 2} --size 1b --host-budget 3GB \
                && "${day[@]}" same-bits ${simulated:+--steps 2} --size 1b --host-budget 3GB --updates-on-device
            ;;
        blocking) CUDA_LAUNCH_BLOCKING=1 "${pytest[@]}" "${rows[@]}" ;;
        slow-copies) INFINITY_SLOW_COPIES=1 "${pytest[@]}" "${rows[@]}" ;;
        sanitizer)
            mapfile -t five < <("${pytest[@]}" --collect-only "${rows[@]}" | grep :: | head -5)
            [ ${#five[@]} -eq 5 ] || return 1
            # The simulated GPU judges every access by itself, and torch's sanitizer wants a real one.
            if [ -z "$simulated" ]; then export TORCH_CUDA_SANITIZER=1; fi
            "${pytest[@]}" "${five[@]}"
            ;;
        peer) peer_runs --out "$out/peer.jsonl" ;;
        peer-more) peer_runs --out "$out/peer-more.jsonl" --set more ;;
        train-1b) one_and_all --size 1b --host-budget 2GB ;;
        train-3b) one_and_all --size 3b --host-budget 8GB --device-budget 6GB --timeline "$out/timeline.json" ;;
        train-8b) "${striped[@]}" train --size 8b --host-budget 60GB --steps 3 ;;
        train-8b-8)
            "${striped[@]}" train --size 8b --host-budget 60GB --micro-batches 8 --schedule vertical --warm 1 --steps 2
            ;;
        update-on-gpu)
            "${day[@]}" train --size 1b --host-budget 8GB --updates-on-device \
                && peer_runs --out "$out/plain.jsonl" --only plain
            ;;
        update-workers)
            "${day[@]}" train --size 1b --host-budget 2GB --update-workers 4 \
                && "${day[@]}" train --size 1b --host-budget 2GB --update-workers 8
            ;;
        synchronisations) "${day[@]}" synchronisations ;;
    esac
}

failed=()
for name in "${slots[@]}"; do
    printf '\n== %s\n' "$name"
    began=$SECONDS
    (slot "$name") 2>&1 | tee "$out/$name.txt"
    if [ "${PIPESTATUS[0]}" -eq 0 ]; then end=passed; else end=FAILED failed+=("$name"); fi
    printf '%s, %s, %d s\n' "$end" "$(date -u +%F)" $((SECONDS - began)) | tee "$out/$name.end"
done
{
    printf '# A day with a GPU\n'
    [ -z "$simulated" ] || printf '\nOn the simulated GPU: no time in here means anything.\n'
    for name in "${all[@]}"; do
        [ -f "$out/$name.end" ] || continue
        printf '\n## %s: %s\n\n```text\n' "$name" "$(<"$out/$name.end")"
        cat "$out/$name.txt"
        printf '```\n'
    done
} >"$out/report.md"
printf '\nReport: %s\n' "$out/report.md"
[ ${#failed[@]} -eq 0 ] || { printf 'Failed: %s\n' "${failed[*]}"; exit 1; }
