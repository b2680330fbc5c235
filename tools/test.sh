#!/usr/bin/env bash
# Makes the environment, then runs ruff, mypy and the quick tests (tests/README.md); with --all also the deep ones. What is
# skipped is listed with its reason. Other arguments go to pytest, e.g.: bash tools/test.sh tests/unit -k layout
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tools/environment.sh
. tools/environment.sh
make_environment dev,hf,plot

export HF_HUB_OFFLINE=1 # no test downloads anything
unset PYTHONDONTWRITEBYTECODE # some images set it; then each of the many processes would compile the packages anew
export OMP_WAIT_POLICY=passive # threads of one process that spin while they wait would take the cores of the others
python=.venv/bin/python
began=$SECONDS
limit=1800
[[ " $* " != *" --all "* ]] || limit=4500

step() {
    printf '\n== %s (%d s so far)\n' "$*" $((SECONDS - began))
    "$@"
}

step "$python" -m ruff check .
step "$python" -m ruff format --check .
"$python" -m mypy --strict infinity swapper & # beside the tests, among whose dots it says what it found: it uses one core
mypy=$!
trap 'kill "$mypy" 2> /dev/null || true' EXIT

# Three processes on two cores: some of a test is waiting. pytest-timeout ends a single test; `timeout` ends a run that a lock
# in C++ keeps it from ending, after all stacks were printed.
side_by_side=(-n 3 --dist worksteal --durations=25)
step timeout --kill-after=30 "$limit" "$python" -m pytest "${side_by_side[@]}" "$@"
[[ "$*" != "" && "$*" != --all ]] || step timeout --kill-after=30 "$limit" "$python" -m pytest "${side_by_side[@]}" "$@" tests/simulated_gpu
step wait "$mypy"
printf '\nAll checks passed in %d s\n' $((SECONDS - began))
