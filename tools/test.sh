#!/usr/bin/env bash
# The checks and tests of this project:
#
#   bash tools/test.sh                    what a change can break; 6 minutes on two slow cores
#   bash tools/test.sh --all              everything, with branch coverage; 25 minutes
#   bash tools/test.sh PYTEST ARGUMENTS   ruff, mypy, and these tests
#
# Sets up .venv with pinned versions, then runs ruff, mypy --strict and pytest. Both lanes have a real
# S3 server on loopback, two-process training, kill -9 and resume. The first leaves out the tests that
# are marked slow: more of each kind, browsers, frameworks, notebooks and fuzzing.
set -euo pipefail
case "${1:-}" in
-h | --help)
    sed -n '2,10s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
source "$(dirname "$0")/env.sh" dev
cd "$root"
# Hundreds of tests start processes; without bytecode each of them would compile this package again.
unset PYTHONDONTWRITEBYTECODE

# Tests write corpora and shards: at most 2 GB at a time.
free_kib=$(df --output=avail "${TMPDIR:-/tmp}" | tail -n 1)
if [ "$free_kib" -lt 3000000 ]; then
    echo "${TMPDIR:-/tmp} has $((free_kib / 1024)) MiB free and the tests need 3000: free some, or set TMPDIR to a larger disk" >&2
    exit 1
fi

ruff format --check mmstream tools tests
ruff check mmstream tools tests
mypy

# Three tests at a time, also on two cores: many wait for processes, servers and clocks. Those of a
# file stay together; tests/conftest.py puts the slow files first. -rs: a line for what is skipped.
lanes=(-n 3 --dist loadfile --no-loadscope-reorder -rfEs --durations 10)
case "${1:-}" in
"")
    exec python -m pytest "${lanes[@]}" -m "not slow"
    ;;
--all) ;;
*)
    exec python -m pytest "$@"
    ;;
esac

# A real browser for the tests of pages; without one those tests are skipped, each with a line.
if ! command -v chromium > /dev/null && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; } \
        > /dev/null 2>&1 || true
fi
command -v chromium > /dev/null ||
    echo "no chromium: the tests in a browser are skipped (Debian: apt-get install chromium)"
python -m pytest "${lanes[@]}" --cov --cov-report= "${@:2}"
coverage report
for part in "order/**" state.py "reading/**" decoding/bad_samples.py; do
    coverage report --include="mmstream/$part" --fail-under=95 > /dev/null || {
        echo "mmstream/$part: less than 95 % branch coverage" >&2
        exit 1
    }
done
python -m tools.size
