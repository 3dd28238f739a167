"""mmstream beside other loaders, decoded samples a second: ``python -m tools.bench.loader``.

The same pictures and the same work for all: decode, shorter side to 256, centre 224, text to 128
tokens with one fast BPE tokenizer, shuffled, in batches. Every measurement is a process of its own;
rounds are interleaved; medians are printed, with ratios to the fastest peer and the fastest bare
loop. Tables:

    decoded     photographs of 500x375
    large       pictures of 2 to 12 megapixels
    curve       mmstream with more and fewer workers and threads

Undecoded samples and indexes have tools of their own: `tools.bench.raw` and `tools.bench.index`.

Each peer has two rows. By its name alone it does what its users write: Pillow, torchvision's
transforms, the tokenizer on each text, float32. "with mmstream's decoder" is the same loader with
this project's decoders as its map function, uint8 to be normalised on the device: the first row
says what the whole brings, the second what the loader alone does. mmstream delivers uint8 as it is
used, and float32 normalised on the host in a row of its own. A bare loop only decodes and resizes
pictures in memory, in as many processes as the others have workers.

"samples/s" and CPU time (of all processes of the run) count when three seconds and an eighth of the
epoch have passed, for eight seconds or to the epoch's end; memory is the peak of the run's
proportional set size, imports included; "first batch" is the time from after the imports to the
first batch, starting the workers included.

The peers' environments are made at the first run (minutes): see `tools.bench.peers.environments`.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.bench.loader_report import print_head, print_table
from tools.bench.loader_runs import measure
from tools.bench.loader_tables import TABLES, Table
from tools.bench.peers import environments


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="append", choices=TABLES, help="repeat; default: all")
    parser.add_argument("--row", action="append", metavar="NAME", help="only these rows; repeat")
    parser.add_argument("--rounds", type=int, help="instead of a table's own number")
    parser.add_argument("--samples", type=int, help="instead of a table's own number")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument(
        "--cache", type=Path, default=environments.CACHE, help="peers' environments"
    )
    parser.add_argument("--quick", action="store_true", help="one round of little data")
    options = parser.parse_args(arguments)
    names = options.table or list(TABLES)
    known = [row.name for name in names for row in TABLES[name].rows]
    for name in options.row or ():
        if name not in known:
            parser.error(f"--row {name!r}: there are {', '.join(dict.fromkeys(known))}")
    print_head()
    for name in names:
        table = sized(TABLES[name], options)
        rows = [row for row in table.rows if not options.row or row.name in options.row]
        if not rows:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = measure(
                table, rows, Path(folder), table.num_rounds, options.num_workers, options.cache
            )
        print_table(table, [row for row in rows if row.name in found], found, options.num_workers)


def sized(table: Table, options: argparse.Namespace) -> Table:
    """Return the table with the number of samples and rounds that were asked for."""
    num_samples, num_rounds = table.num_samples, table.num_rounds
    if options.quick:
        num_samples, num_rounds = 12 * table.batch_size, 1
    return dataclasses.replace(
        table,
        num_samples=options.samples or num_samples,
        num_rounds=options.rounds or num_rounds,
    )


if __name__ == "__main__":
    main()
