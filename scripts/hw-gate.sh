#!/bin/sh
# The release gate: scripts/hw-gate.sh [quick|full] [options of `1bit gate`]
# Takes the repository's configuration and virtual environment, from whatever folder it is called.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
program=$root/.venv/bin/1bit
[ -x "$program" ] || program=1bit
# Of an option that is given twice the last one holds.
exec "$program" gate --config "$root/configs/hw-gate.toml" "$@"
