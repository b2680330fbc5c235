# Sourced by demo.sh and test.sh. make_environment EXTRAS: leaves a ready .venv in the repository's root, with the versions
# of constraints.txt. Needs python >= 3.11 and nothing else; a second call with nothing changed takes no time.

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.14 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "No python >= 3.11 found. Install one, or name it: PYTHON=/path/to/python bash $0"
}

make_environment() {
    local extras=$1 python stamp
    stamp=".venv/.installed-$(printf '%s' "$extras" | tr ',' '-')"
    if [ -x .venv/bin/python ] && [ -f "$stamp" ] && [ "$stamp" -nt pyproject.toml ] && [ "$stamp" -nt constraints.txt ] \
        && .venv/bin/python -c 'import torch, infinity, swapper' 2>/dev/null; then
        return
    fi
    if [ -e .venv/.installing ]; then # it was cut off, and pip cannot mend what is half there
        rm -rf .venv
    fi
    if [ ! -x .venv/bin/python ]; then
        python=$(find_python) || exit 1
        printf 'Making .venv with %s (%s)\n' "$python" "$("$python" -V)"
        if ! "$python" -m venv .venv; then
            rm -rf .venv
            fail "$python cannot make a virtual environment." \
                "On Debian and Ubuntu its venv module is a package of its own: apt-get install python3-venv"
        fi
    fi
    printf 'Installing infinity-offload[%s] and what it needs (torch is large: a few minutes on a new machine)\n' "$extras"
    # The versions under test, whatever the user's settings for pip say. Which build of torch (CUDA, CPU) is left to the
    # index: the default one gives Linux a build that runs on NVIDIA GPUs and on the CPU alike. Not compiled: of torch's and
    # transformers' thousands of modules only those that are imported need it, then.
    touch .venv/.installing
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --only-binary :all: \
        -c constraints.txt -e ".[$extras]" \
        || { rm .venv/.installing && fail "The installation failed; pip's own message is above."; }
    rm .venv/.installing
    touch "$stamp"
}
