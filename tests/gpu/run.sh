#!/usr/bin/env bash
# Tests and measures the CUDA accelerator on this machine's first device, in less than 5 minutes. See README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
packages=.build/gpu-packages

# A Python with torch as it is, and beside it only what is missing there: from the folder WHEELS, or from pip's index.
export PYTHONPATH="$PWD:$PWD/$packages${PYTHONPATH:+:$PYTHONPATH}"
missing=()
for package in cffi numpy pytest pytest-timeout hypothesis; do
    "$python" -c "import ${package//-/_}" 2>/dev/null || missing+=("$package")
done
if [ "${#missing[@]}" -gt 0 ]; then
    echo "gpu: installing ${missing[*]} into $packages" >&2
    timeout 60 "$python" -m pip install -q --target "$packages" \
        ${WHEELS:+--no-index --find-links "$WHEELS"} "${missing[@]}"
fi

failed=0
timeout 150 "$python" -m pytest -m gpu tests/gpu "$@" || failed=$?
timeout 60 "$python" -m tests.gpu.measure || failed=$?
exit "$failed"
