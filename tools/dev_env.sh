#!/usr/bin/env bash
# Makes .venv in the tree: OrbitKV, installed in place, and the tools that check it. Does nothing when it is up to date.
# PYTHON= is the interpreter that it is made from (default python3).
set -euo pipefail
exec >&2
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tools/system_packages.sh

exec 9>.venv.lock
flock --nonblock 9 || { echo "set-up: waiting for another set-up of this tree"; flock 9; }

# The stamp says what .venv was made from: the interpreter and the place (an environment cannot be moved), then pyproject.toml.
stamp=.venv/.made-from
base=$({ "$python" -c 'import sys; print(sys.version, sys.base_prefix)'; pwd; } | sha256sum | cut -c1-16)
project=$(sha256sum < pyproject.toml | cut -c1-16)
made_from=$(cat "$stamp" 2>/dev/null || true)
[ "$made_from" != "$base $project" ] || exit 0

echo "set-up: making .venv with $("$python" --version), about a minute"
if [ "${made_from%% *}" != "$base" ]; then
    rm -rf .venv
    "$python" -m venv .venv
fi
echo "$base incomplete" > "$stamp"
.venv/bin/python -m pip install --disable-pip-version-check --quiet --editable '.[dev]'
echo "$base $project" > "$stamp"
echo "set-up: .venv is ready"
