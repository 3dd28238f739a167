# Sourced by quickstart.sh and test.sh: this project's own virtual environment in .venv, with the
# versions and hashes of requirements.lock. A second run takes a second: the environment is made anew
# only when pyproject.toml, requirements.lock or the C sources change.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
stamp="$venv/.mmstream-$1"
wanted=$(cat "$root/pyproject.toml" "$root/requirements.lock" "$root/setup.py" "$root"/mmstream/csrc/* | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "setting up $venv (pinned versions, a few minutes on a new machine)"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "mmstream needs Python 3.11 or newer as python3" >&2
        exit 2
    }
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
    # torch first: pip takes the build that this machine's package index prefers, such as a CPU build.
    # With --require-hashes it would always take the CUDA build, so its hash is checked here.
    wheels=$(mktemp -d)
    pip download --no-deps --dest "$wheels" "$(grep -o '^torch==[^ ]*' "$root/requirements.lock")"
    if ! grep -q "$(sha256sum "$wheels"/torch-*.whl | cut -d' ' -f1)" "$root/requirements.lock"; then
        echo "$(basename "$wheels"/torch-*.whl): its hash is not in requirements.lock" >&2
        exit 1
    fi
    pip install --no-deps "$wheels"/torch-*.whl
    rm -r "$wheels"
    pip install --no-deps --require-hashes --requirement "$root/requirements.lock"
    # A CUDA build of torch needs CUDA packages beside it.
    if "$venv/bin/python" -c 'import sys; from importlib.metadata import requires
sys.exit(sys.platform != "linux" or not any("nvidia" in name for name in requires("torch")))'; then
        pip install --no-deps --require-hashes --requirement "$root/requirements-cuda.lock"
    fi
    pip install --no-deps --no-build-isolation --editable "$root"
    unset -f pip
    echo "$wanted" > "$stamp"
fi
PATH="$venv/bin:$PATH"
