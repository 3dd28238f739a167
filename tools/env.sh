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
    install() {
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"
    }
    install --require-hashes --requirement "$root/requirements.lock"
    # A CUDA build of torch needs CUDA packages beside it; a CPU build does not.
    if "$venv/bin/python" -c 'import sys; from importlib.metadata import requires
sys.exit(sys.platform != "linux" or not any("nvidia" in name for name in requires("torch")))'; then
        install --require-hashes --requirement "$root/requirements-cuda.lock"
    fi
    install --no-build-isolation --editable "$root"
    echo "$wanted" > "$stamp"
fi
PATH="$venv/bin:$PATH"
