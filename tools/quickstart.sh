#!/usr/bin/env bash
# The main job on a fresh machine: bash tools/quickstart.sh [--s3] [OUT]
#
# Sets up .venv with pinned versions, then runs `mmstream demo` on the embedded corpus: convert,
# verify, train with two processes, kill -9 one, resume on one, prove, report. With --s3 the shards
# and checkpoints lie on a real S3 server that runs on loopback for the time of the job.
set -euo pipefail
s3=
if [ "${1:-}" = --s3 ]; then
    s3=1
    shift
fi
case "${1:-}" in
-*)
    sed -n '2,6s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
out=${1:-quickstart-out}
source "$(dirname "$0")/env.sh" dev
if [ -n "$s3" ]; then
    python "$root/tools/s3_server.py" -- \
        sh -c 'exec mmstream demo --out "$1" --shards "s3://$MMSTREAM_S3_BUCKET/demo"' sh "$out"
else
    mmstream demo --out "$out"
fi
