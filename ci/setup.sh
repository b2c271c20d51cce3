# What several scripts begin with. Sourced: `. "$(dirname "$0")/setup.sh"`. Goes to the root of the project.
set -euo pipefail
unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_RETRIES=10
target=${CARGO_TARGET_DIR:-$PWD/target}
nightly=${NIGHTLY:-nightly}

# Ends the script with a message.
fail() {
    echo "ci/$(basename "$0"): $*" >&2
    exit 1
}

# Installs the Debian packages of those programs that are missing: PROGRAM:PACKAGE.
install_missing() {
    local packages=() tool
    for tool in "$@"; do
        command -v "${tool%:*}" >/dev/null || packages+=("${tool#*:}")
    done
    ((${#packages[@]})) || return 0
    install_packages "${packages[@]}"
}

# Services among them must not start.
install_packages() {
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -qq -y --no-install-recommends \
        -o DPkg::Lock::Timeout=300 "$@" >/dev/null
}

# Makes a virtual environment in target/NAME, with these packages, and names it `venv`.
virtual_environment() {
    venv=$target/$1
    [[ -x $venv/bin/python ]] || python3 -m venv "$venv"
    (($# == 1)) || "$venv/bin/pip" install --quiet "${@:2}"
}

# Names the library for C by AQUIFER_LIB, built in debug unless it is named already.
library() {
    [[ -n ${AQUIFER_LIB:-} ]] || cargo build -p aquifer-ffi
    export AQUIFER_LIB=${AQUIFER_LIB:-$target/debug/libaquifer_ffi.so}
}
