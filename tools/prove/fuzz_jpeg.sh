#!/usr/bin/env bash
# Fuzz the C JPEG decoder under AddressSanitizer and UndefinedBehaviorSanitizer:
#   bash tools/prove/fuzz_jpeg.sh [SECONDS] [FILE...]
#
# Needs a C compiler only. Builds the decoder twice, with its SSE2 code and with its portable code,
# and gives the same mutated files to both, for about SECONDS (60) in all. It fails at the first
# sanitizer report, crash, or input that takes too long, and saves that input. It also fails if the
# two builds give different pixels. See docs/decoder-safety.md.
#
# FILE: seed files in place of the stored ones. With SECONDS = 0 they are decoded without mutations.
# That is how to repeat a failure.
# Environment: CC (gcc); SEED of the mutations (1); INPUTS, which end the run before SECONDS; OUT, a
# folder for the builds and for failing inputs (build/fuzz_jpeg).
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
compiler=${CC:-gcc}
seconds=${1:-60}
files=("${@:2}")
if [ ${#files[@]} = 0 ]; then
    export LC_ALL=C # the same order of files everywhere
    files=("$root"/tests/data/jpeg_corpus/*.jpg "$root"/tests/data/odd_images/*.jpg)
fi
out=${OUT:-$root/build/fuzz_jpeg}/$(basename "$compiler")
mkdir -p "$out"
rm -f "$out"/failure-*.jpg

build() { # NAME FLAG...
    local newer
    newer=$(find "$root"/mmstream/csrc "$root"/tools/prove/fuzz_jpeg* -newer "$out/$1" 2>&1) || true
    [ -n "$newer" ] || return 0
    "$compiler" -std=c11 -ffp-contract=off -O2 -g -Wall -Wextra -fno-omit-frame-pointer \
        -fsanitize=address,undefined -fno-sanitize-recover=all "${@:2}" \
        "$root"/tools/prove/fuzz_jpeg{,_target}.c -o "$out/$1"
}

# New memory is filled with FILL, which differs between the builds. So the pixels also differ if
# they depend on memory that was never written.
fuzz() { # NAME FILL SECONDS INPUTS
    local status=0
    export UBSAN_OPTIONS=halt_on_error=1:abort_on_error=1:print_stacktrace=1
    export ASAN_OPTIONS=abort_on_error=1:quarantine_size_mb=16
    ASAN_OPTIONS+=:max_malloc_fill_size=1000000000:malloc_fill_byte=$2
    "$out/$1" "$3" "$4" "${SEED:-1}" "$out/failure-$1.jpg" "${files[@]}" \
        > "$out/$1.txt" || status=$?
    sed "s/^/$1: /" "$out/$1.txt"
    if [ $status != 0 ]; then
        echo "FAILED: $1 ended with status $status" >&2
        [ ! -e "$out/failure-$1.jpg" ] || echo "its input: $out/failure-$1.jpg" >&2
        exit 1
    fi
}

value() { # NAME KEY
    sed -En "s/^$2 ([0-9a-f]+)$/\\1/p" "$out/$1.txt"
}

build sse2 &
other=$!
build portable -U__SSE2__
wait $other

fuzz sse2 0 $((seconds / 2)) "${INPUTS:-1000000000}"
fuzz portable 255 1000000000 "$(value sse2 inputs)"
if [ "$(value sse2 checksum)" != "$(value portable checksum)" ]; then
    echo "FAILED: pixels differ between the builds, or depend on memory never written" >&2
    exit 1
fi
echo "no failures"
