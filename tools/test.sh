#!/usr/bin/env bash
# All checks and all tests: bash tools/test.sh [PYTEST ARGUMENTS]
#
# Sets up .venv with pinned versions, then ruff, mypy --strict and pytest (with a real S3 server on
# loopback, two-process training and kill -9), about five minutes on two cores.
set -euo pipefail
source "$(dirname "$0")/env.sh" dev
cd "$root"
ruff format --check mmstream tools tests
ruff check mmstream tools tests
mypy
python -m pytest "$@"
