#!/usr/bin/env bash
# All checks and all tests: bash tools/test.sh [PYTEST ARGUMENTS]
#
# Sets up .venv with pinned versions, then ruff, mypy --strict and pytest (with a real S3 server on
# loopback, two-process training and kill -9). Without arguments it also measures branch coverage of
# the parts that promise exact orders, states and counts.
set -euo pipefail
source "$(dirname "$0")/env.sh" dev
cd "$root"
# Hundreds of tests start processes; without bytecode each of them would compile this package again.
unset PYTHONDONTWRITEBYTECODE
# A real browser for the tests of the HTML report; without one those tests are skipped.
if ! command -v chromium > /dev/null && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; } \
        > /dev/null 2>&1 || echo "no chromium: the tests in a browser are skipped"
fi
ruff format --check mmstream tools tests
ruff check mmstream tools tests
mypy
if [ $# -gt 0 ]; then
    exec python -m pytest "$@"
fi
# Three tests at a time, also on two cores: many wait for processes, servers and clocks. Those of a
# file stay together; tests/conftest.py puts the slow files first.
python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --cov --cov-report=
coverage report
for part in "order/**" state.py "reading/**" "bad_samples/**"; do
    coverage report --include="mmstream/$part" --fail-under=95 > /dev/null || {
        echo "mmstream/$part: less than 95 % branch coverage" >&2
        exit 1
    }
done
