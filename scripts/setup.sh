#!/bin/sh
# Make a virtual environment and install this project into it, unless that was done before.
#
#   scripts/setup.sh VENV STAMP WHAT ALONE
#
# WHAT is installed editable with its dependencies, ALONE without any. STAMP keeps a checksum of
# what they were made from. $PYTHON names the interpreter; else the newest suitable one is taken.
set -eu

venv=$1 stamp=$2 what=$3 alone=$4

suitable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

find_python() {
    for name in ${PYTHON:-python3.14 python3.13 python3.12 python3.11 python3.10 python3}; do
        if suitable "$name"; then
            echo "$name"
            return
        fi
    done
    echo "setup: no Python 3.10 or newer with the venv module was found (tried: ${PYTHON:-python3.14 to python3.10, python3})" >&2
    echo "hint: install one (Debian: apt install python3-venv), or name it: make PYTHON=/path/to/python3" >&2
    exit 1
}

sum=$(cat pyproject.toml - <<EOF | cksum
$what $alone
EOF
)

if suitable "$venv/bin/python"; then
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$sum" ]; then
        touch "$stamp"
        exit 0
    fi
else
    python=$(find_python)
    echo "setup: making $venv with $("$python" --version) ..." >&2
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

echo "setup: installing $what $alone (once) ..." >&2
pip="$venv/bin/python -m pip install --quiet --disable-pip-version-check"
$pip --editable "$what"
if [ -n "$alone" ]; then
    $pip --no-deps "$alone"
fi
echo "$sum" >"$stamp"
