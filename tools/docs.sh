#!/usr/bin/env bash
# Builds the pages of docs/ as a site in site/. A broken link is an error. `bash tools/docs.sh serve` shows it while you write.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tools/environment.sh
. tools/environment.sh

# An environment of its own, without torch: the pages that tools print are kept in docs/, and tests compare them.
if [ ! -x .venv-docs/bin/mkdocs ]; then
    python=$(find_python) || exit 1
    "$python" -m venv .venv-docs
    .venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: -c constraints.txt mkdocs-material
fi
command=${1:-build}
exec env NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs "$command" --strict "${@:2}"
