# Sourced by quickstart.sh and test.sh: this project's own virtual environment in .venv, with the
# versions of constraints.txt. A second run takes a second: the environment is made anew only when
# pyproject.toml, constraints.txt or what is compiled changed.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
stamp="$venv/.mmstream-$1"
wanted=$(cat "$root/pyproject.toml" "$root/constraints.txt" "$root/setup.py" "$root"/mmstream/csrc/* | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "setting up $venv (pinned versions, a few minutes on a new machine)"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "mmstream needs Python 3.11 or newer as python3" >&2
        exit 2
    }
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    # torch is named with its exact version in the command itself: a looser request makes pip take
    # the newest build with several GB of CUDA packages where a CPU build was meant.
    torch=$(grep '^torch==' "$root/constraints.txt")
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$root/constraints.txt" "$torch" --editable "$root[$1]"
    echo "$wanted" > "$stamp"
fi
PATH="$venv/bin:$PATH"
