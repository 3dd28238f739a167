"""Samples from S3 beside other loaders: ``python -m tools.bench.storage``.

A real S3 server (SeaweedFS) runs on this machine, and a proxy before it adds latency to the first
byte, limits the rate of each connection, and breaks answers (`tools.bench.storage.scenarios`). All
loaders read the same samples, shuffled and in batches, with two worker processes. Every measurement
is a new process, rounds are interleaved, and the tables have medians.

Eight tars stand for 1,000 by name (`tools.bench.storage.corpus`). The rows are raw clients at 64
connections, mmstream raw and with decoded images, and the other loaders without decoding.

Columns:

    late            samples a second after 40 % of the run; raw clients by their bytes
    to obstore      share of what the raw client gets on the same link
    start           seconds from the call that opens the data to when all workers are up
    @1, @10, @100   seconds until that batch came, from when all workers were up
    wait            of the consumer for a batch, in the late part
    CPU s/GB        of all processes of the row, per 10^9 bytes of delivered samples
    GET/GB          requests per 10^9 bytes that were sent, in the late part
    read/used       bytes that were sent to those of delivered samples, in the late part; above 1
                    while windows and buffers still fill
    faults          answers that the proxy broke or slowed down

A row whose workers are not up after ``--start-timeout`` ends, and so does a run whose time is over
while it waits for a batch. The table says which batch was not reached.

The server and the proxy use the same cores as the loaders. ``--quick`` takes about two minutes. The
first run installs the peers (`tools.bench.peers.environments`) and converts the samples to their
formats. Both are kept in ``--cache``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tests.helpers.http_fault_proxy import fault_proxy
from tools.bench.loader_report import print_machine
from tools.bench.peers import environments
from tools.bench.storage.corpus import write_tars
from tools.bench.storage.report import COLUMNS, SHORT, print_table
from tools.bench.storage.rows import all_rows
from tools.bench.storage.runs import Bench, Run
from tools.bench.storage.scenarios import SCENARIOS
from tools.s3_server import s3_server

QUICK_ROWS = ("obstore", "mmstream", "webdataset, curl")
QUICK_SCENARIOS = ("direct", "50/40", "200/10")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the requested tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--scenario", action="append", choices=SCENARIOS, help="repeat; default: all"
    )
    parser.add_argument("--row", action="append", metavar="NAME", help="repeat; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    parser.add_argument("--shards", type=int, default=1000, help="names of the corpus")
    parser.add_argument("--samples", type=int, default=500, help="of each shard")
    parser.add_argument("--start-timeout", type=float, default=60.0, help="seconds of a start")
    parser.add_argument("--images", type=Path, help="a folder of JPEGs; default: the demo's")
    parser.add_argument("--away", type=float, default=10.0, help="seconds without a server")
    parser.add_argument(
        "--checkout", action="append", type=Path, default=[], help="another mmstream; repeat"
    )
    parser.add_argument("--json", type=Path, help="a file for all figures, one run a line")
    parser.add_argument(
        "--cache", type=Path, default=environments.CACHE, help="folder of the peers"
    )
    parser.add_argument("--short", action="store_true", help="the columns of the documentation")
    parser.add_argument("--quick", action="store_true", help="few rows and scenarios, one round")
    options = parser.parse_args(arguments)
    known = all_rows(options.checkout)
    names = options.row or (QUICK_ROWS if options.quick else tuple(known))
    for name in names:
        if name not in known:
            parser.error(f"no row {name!r}; the rows are {'; '.join(known)}")
    rows = [known[name] for name in names]
    scenarios = options.scenario or (QUICK_SCENARIOS if options.quick else tuple(SCENARIOS))
    num_rounds, seconds = (1, 6.0) if options.quick else (options.rounds, options.seconds)
    print_machine()
    with (
        tempfile.TemporaryDirectory() as folder,
        s3_server() as server,
        fault_proxy(server.endpoint) as proxy,
    ):
        tars = Path(folder, "tars")
        tars.mkdir()
        sample_bytes = write_tars(tars, options.samples, options.images)
        shard_bytes = min(path.stat().st_size for path in tars.iterdir())
        bench = Bench(
            server,
            proxy,
            Path(folder),
            sample_bytes,
            shard_bytes,
            options.cache,
            options.start_timeout,
        )
        print(f"{options.shards} shards of {options.samples} samples of {sample_bytes:,} bytes")
        for name in scenarios:
            scenario = SCENARIOS[name]
            if scenario.away_s:
                scenario = replace(scenario, away_s=options.away)
            own = [row for row in rows if row.kind in scenario.kinds]
            runs: dict[str, list[Run]] = {row.name: [] for row in own}
            for number in range(num_rounds):
                for row in own[:: -1 if number % 2 else 1]:
                    began = time.monotonic()
                    more = {"seconds": seconds + scenario.away_s}
                    if scenario.paced:
                        free = bench.run(row, scenario, options.shards, **more)
                        more["paced"] = free.late / 2
                    run = bench.run(row, scenario, options.shards, **more)
                    runs[row.name].append(run)
                    print(
                        f"{name}, round {number + 1}: {row.name}: {run.late:,.0f} samples/s, "
                        f"{time.monotonic() - began:.0f} s {run.error[-500:]}",
                        file=sys.stderr,
                    )
                    if options.json:
                        with options.json.open("a") as file:
                            line = {"scenario": name, "row": row.name, **asdict(run)}
                            file.write(json.dumps(line) + "\n")
            columns = SHORT if options.short else COLUMNS
            print_table(scenario, own, runs, sample_bytes, columns)


if __name__ == "__main__":
    main()
