#!/usr/bin/env bash
# All checks and all tests: bash tools/test.sh [PYTEST ARGUMENTS]
#
# Sets up .venv with pinned versions, then ruff, mypy --strict and pytest (with a real S3 server on
# loopback, two-process training and kill -9), about five minutes on two cores.
set -euo pipefail
source "$(dirname "$0")/env.sh" dev
cd "$root"
# A real browser for the tests of the HTML report; without one those tests are skipped.
if ! command -v chromium > /dev/null && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; } \
        > /dev/null 2>&1 || echo "no chromium: the tests in a browser are skipped"
fi
ruff format --check mmstream tools tests
ruff check mmstream tools tests
mypy
python -m pytest "$@"
