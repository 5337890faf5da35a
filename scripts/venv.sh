# Sourced by the other scripts: makes .venv and installs the package into it, once per content of pyproject.toml.
#
#   prepare_venv EXTRA     afterwards $VENV/bin holds everything
#
# VENV may name another place for the virtual environment.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${VENV:-$PWD/.venv}"
export PIP_DISABLE_PIP_VERSION_CHECK=1

# Any torch >= 2.8 works; a version is named here so that everybody tests the same. An installed one is left alone.
# PyPI's build for Linux brings CUDA along. For a machine without a GPU a much smaller one can be installed into $VENV
# beforehand from PyTorch's own CPU index.
TORCH="torch==2.13.0"

find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "This needs Python 3.11 or newer with its venv module (Debian: apt-get install python3 python3-venv)." >&2
    return 1
}

prepare_venv() {
    local extra="$1" stamp wanted python
    stamp="$VENV/.headwater-$extra"
    wanted="$PWD $(cksum <pyproject.toml) $TORCH"
    if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
        return
    fi
    if [[ ! -x "$VENV/bin/python" ]]; then
        python="$(find_python)"
        echo "Making a virtual environment in $VENV" >&2
        "$python" -m venv "$VENV"
    fi
    echo "Installing headwater[$extra]; the first time this takes a few minutes" >&2
    if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
        "$VENV/bin/pip" install --quiet "$TORCH"
    fi
    "$VENV/bin/pip" install --quiet --editable ".[$extra]"
    echo "$wanted" >"$stamp"
}
