"""Compare what pipelines make of small corpora with a golden file, tensor by tensor.

    python -m tools.prove.digests                       # compare all cases
    python -m tools.prove.digests --case packs          # those whose name has this word
    python -m tools.prove.digests --write               # renew the golden file

Each case is read without workers and with one. A line tells each case and field that differ, and
the exit code is 1.

The file says which versions and which kind of processor made it. With others, pixels and samples of
sound may differ by one level on average, and errors of libraries in their words. All other values
must be equal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tools.prove.digests.record import compare, run_cases, write


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare or write, print what differs, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="", metavar="WORD", help="only cases of this name")
    parser.add_argument("--write", action="store_true", help="renew all of the golden file")
    options = parser.parse_args(arguments)
    results = run_cases("" if options.write else options.case)
    if options.write:
        write(results)
    lines = list(compare(results))
    print("\n".join([*lines, f"{len(results.records)} cases, {len(lines)} differences"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
