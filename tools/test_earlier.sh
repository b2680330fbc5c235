#!/usr/bin/env bash
# Runs the tests of the integrations with one earlier minor of each library, and those of the command line with the oldest
# click. Makes .venv as tools/test.sh does, and beside it .venv-earlier, which holds the earlier libraries and finds
# everything else in .venv.
# Arguments go to pytest in place of those tests, e.g.: bash tools/test_earlier.sh tests/integration/test_trainer.py -k resume
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tools/environment.sh
. tools/environment.sh
make_environment dev,hf,plot

earlier=(transformers==5.22.2 accelerate==1.14.0 lightning==2.5.6 pytorch-lightning==2.5.6 click==8.1.8)
stamp=.venv-earlier/.installed-$(printf '%s_' "${earlier[@]}")
if [ ! -f "$stamp" ] || [ .venv/bin/python -nt "$stamp" ]; then
    rm -rf .venv-earlier
    .venv/bin/python -m venv .venv-earlier
    where='import sysconfig; print(sysconfig.get_path("purelib"))'
    .venv/bin/python -c "$where" >"$(.venv-earlier/bin/python -c "$where")/current.pth"
    .venv-earlier/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --no-deps "${earlier[@]}" \
        || fail "The installation failed; pip's own message is above."
    touch "$stamp"
fi

tests=()
for name in trainer trainer_micro_batches derived_trainers accelerator lightning thirty_steps plain_scripts as_deepspeed \
    deepspeed_names files_in_little_memory; do
    tests+=("tests/integration/test_$name.py")
done
tests+=(tests/distributed/test_integrations.py tests/distributed/test_lightning.py tests/unit/integrations tests/unit/cli)
[ $# -gt 0 ] || set -- "${tests[@]}"
export HF_HUB_OFFLINE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --kill-after=30 1800 .venv-earlier/bin/python -m pytest -n 2 --dist worksteal "$@"
