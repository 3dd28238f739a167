#!/usr/bin/env bash
# Usage: bash tools/prove/fuzz_samples.sh [SECONDS]
# Builds the compiled parser of samples with sanitizers, and gives it mutated tars.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
module=$folder/_plain_samples$(python -c "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")
gcc -g -O1 -std=c11 -Wall -Wextra -shared -fPIC \
    -fsanitize=address,undefined -fno-sanitize-recover=all \
    -I"$(python -c "import sysconfig; print(sysconfig.get_paths()['include'])")" \
    mmstream/csrc/plain_samples.c -o "$module"
# Python itself frees little at its end, so leaks are not looked for. With its own allocator, the
# sanitizers would not see the ends of blocks.
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
    python -m tools.prove.fuzz_samples "$module" "${1:-60}"
