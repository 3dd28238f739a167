# Sourced by quickstart.sh and test.sh: this project's own virtual environment in .venv, with the
# versions and hashes of requirements.lock. A second run takes a second: the environment is rebuilt
# only when pyproject.toml or requirements.lock changes.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
stamp="$venv/.mmstream-$1"
setup_log="${TMPDIR:-/tmp}/mmstream-setup-$$.log"

# Print the first of these commands that is Python 3.11 or newer.
find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            echo "$name"
            return
        fi
    done
    return 1
}

# Say in one line what failed and what to do, and end. The stamp is written last, so that the next
# call starts over and never trusts what stands there now.
give_up() {
    local cure
    case "$(tail -n 200 "$setup_log" 2> /dev/null)" in
    *"No space left on device"* | *"Disk quota exceeded"*)
        cure="no space left: $root and ${TMPDIR:-/tmp} need 3 GB together, or 12 GB with a CUDA build of torch" ;;
    *ensurepip*)
        cure="this Python has no venv: install it (Debian: apt-get install python3-venv)" ;;
    *"NewConnectionError"* | *"ConnectTimeoutError"* | *"ProxyError"* | *"NameResolutionError"* | \
        *"Failed to establish a new connection"* | *"No matching distribution found"*)
        cure="the package index does not answer or lacks a package: check the network, or set PIP_INDEX_URL to your mirror" ;;
    *)
        cure="$(grep -v '^ *$' "$setup_log" 2> /dev/null | tail -n 1)" ;;
    esac
    echo "cannot set up $venv: $cure (log: $setup_log); then run this command again" >&2
    exit 1
}

make_environment() {
    local wheels
    # Without a stamp the last setup did not end, so nothing of it is kept.
    [ -n "$had_stamp" ] || "$python" -m venv --clear "$venv" || return
    pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check --retries 2 "$@"; }
    # torch first: pip takes the build that this machine's package index prefers, such as a CPU build.
    # With --require-hashes it would always take the CUDA build, so its hash is checked here.
    wheels=$(mktemp -d) || return
    pip download --no-deps --dest "$wheels" "$(grep -o '^torch==[^ ]*' "$root/requirements.lock")" &&
        if ! grep -q "$(sha256sum "$wheels"/torch-*.whl | cut -d' ' -f1)" "$root/requirements.lock"; then
            echo "$(basename "$wheels"/torch-*.whl): its hash is not in requirements.lock" >&2
            rm -r "$wheels"
            return 1
        fi &&
        pip install --no-deps "$wheels"/torch-*.whl || { rm -r "$wheels"; return 1; }
    rm -r "$wheels"
    pip install --no-deps --require-hashes --requirement "$root/requirements.lock" || return
    # A CUDA build of torch needs CUDA packages beside it.
    if "$venv/bin/python" -c 'import sys; from importlib.metadata import requires
sys.exit(sys.platform != "linux" or not any("nvidia" in name for name in requires("torch")))'; then
        pip install --no-deps --require-hashes --requirement "$root/requirements-cuda.lock" || return
    fi
    pip install --no-deps --no-build-isolation --editable "$root" || return
    unset -f pip
    echo "$wanted" > "$stamp"
}

wanted=$(cat "$root/pyproject.toml" "$root/requirements.lock" | sha256sum)
if [ "$(cat "$stamp" 2> /dev/null)" != "$wanted" ]; then
    python=$(find_python) || {
        echo "mmstream needs Python 3.11 or newer: install it (Debian: apt-get install python3.11 python3.11-venv), then run this command again" >&2
        exit 2
    }
    echo "setting up $venv (pinned versions, a few minutes on a new machine)"
    had_stamp=$(ls "$stamp" 2> /dev/null || true)
    rm -f "$stamp"
    make_environment > "$setup_log" 2>&1 || give_up
    rm -f "$setup_log"
fi
PATH="$venv/bin:$PATH"
