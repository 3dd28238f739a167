"""The tables of docs/benchmarks.md: ``python -m tools.bench TABLE``.

    buckets       steps of one shape beside diffusers' and Lhotse's samplers, two minutes
    decoded       decoded samples a second beside other loaders, ten minutes
    equal-steps   steps and samples of every rank beside other loaders, half an hour
    mixing        how well the order mixes, and what its windows cost, a minute
    storage       raw samples from S3 behind slow and faulty links, ten minutes

Run it on a machine that does nothing else, but for "mixing", which only computes.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tools.bench import buckets, decoded, equal_steps, mixing, storage
from tools.bench.loaders import LOADERS

TABLES = ("buckets", "decoded", "equal-steps", "mixing", "storage")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one table."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loader", action="append", help="only these; repeat")
    parser.add_argument("--samples", type=int, help="of each corpus of decoded")
    parser.add_argument("--scenario", action="append", choices=storage.SCENARIOS, help="repeat")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run of storage")
    parser.add_argument(
        "--checkout", action="append", type=Path, default=[], help="another version, for storage"
    )
    parser.add_argument("--recordings", type=Path, help="folder of WAV files, for buckets")
    options = parser.parse_args(arguments)
    known = list(LOADERS if options.table == "decoded" else equal_steps.SYSTEMS)
    for name in options.loader or ():
        if name not in known:
            parser.error(f"no loader {name!r} in {options.table}; there are {', '.join(known)}")
    print_machine()
    if options.table == "buckets":
        buckets.compare(options.rounds, options.recordings)
    elif options.table == "decoded":
        decoded.compare(options.rounds, options.samples, options.loader)
    elif options.table == "equal-steps":
        equal_steps.compare(options.loader)
    elif options.table == "mixing":
        mixing.tables()
    else:
        storage.compare(options.scenario, options.rounds, options.seconds, options.checkout)


def print_machine() -> None:
    """Print date, machine and load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {names[0] if names else platform.machine()}, "
        f"{os.cpu_count()} cores, {memory:.0f} GiB, load {os.getloadavg()[0]:.1f} at the start, "
        f"Python {platform.python_version()}",
        flush=True,
    )


if __name__ == "__main__":
    main()
