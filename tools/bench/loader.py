"""Decoded samples per second beside other loaders: ``python -m tools.bench.loader``.

All loaders do the same work on the same images, shuffled and in batches. Images are decoded, the
shorter side is resized to 256, and the central 224x224 is kept. Texts become 128 tokens with one
fast BPE tokenizer. Every measurement is a new process, and rounds are interleaved. The tables have
medians, and ratios to the fastest peer and to the fastest bare loop:

    decoded     photographs of 500x375
    mixed       real photographs of 0.05 to 2 megapixels, made from JPEGs in ``--photographs``
    large       images of 2 to 12 megapixels
    curve       mmstream with different numbers of workers and threads

`tools.bench.raw` measures samples without decoding, and `tools.bench.index` measures indexing.

Most peers have two rows. The row with its name alone is what its users write: Pillow, torchvision's
transforms, the tokenizer on each text, float32 batches. The row "with mmstream's decoder" uses
mmstream's decoders as the map function of the same loader and delivers uint8 batches. So the first
row compares everything, and the second compares the loaders alone. mmstream delivers uint8 batches,
which are normalised on the device; a row of its own delivers float32, normalised on the host. A
bare loop only decodes and resizes images in memory, in as many processes as the others have
workers. NVIDIA DALI and SPDL read, decode and resize in threads of their own, as many as the others
have workers, and deliver uint8. Their texts are tokenized in one call a batch.

Columns: "samples/s" and CPU time of all processes are measured for eight seconds or to the end of
the epoch. They start when three seconds and an eighth of the epoch have passed. Memory is the peak
of the run's proportional set size, with imports. "First batch" is the time from the end of the
imports to the first batch, with the start of the workers.

On a machine with other work, ``--turns 10`` measures all rows in turns of two seconds. Name a few
rows then: all of them are in memory at once.

The first run installs the peers (minutes): `tools.bench.peers.environments`.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tools.bench.loader_report import print_head, print_table
from tools.bench.loader_runs import Run, measure
from tools.bench.loader_tables import TABLES, Table
from tools.bench.loader_turns import measure_in_turns
from tools.bench.peers import environments


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the requested tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="append", choices=TABLES, help="repeat; default: all")
    parser.add_argument("--row", action="append", metavar="NAME", help="only these rows; repeat")
    parser.add_argument("--rounds", type=int, help="default: the number of each table")
    parser.add_argument(
        "--turns", type=int, help="instead of rounds: let all rows run in turns (shared machines)"
    )
    parser.add_argument("--turn-seconds", type=float, default=2.0)
    parser.add_argument("--samples", type=int, help="default: the number of each table")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument(
        "--photographs", type=Path, nargs="+", metavar="FOLDER", help="JPEGs for the table mixed"
    )
    parser.add_argument(
        "--cache", type=Path, default=environments.CACHE, help="folder of the peers"
    )
    parser.add_argument("--quick", action="store_true", help="one round with few samples")
    options = parser.parse_args(arguments)
    names = options.table or [name for name in TABLES if _can_write(name, options)]
    for name in names:
        if not _can_write(name, options):
            parser.error(f"--table {name} needs --photographs FOLDER")
    known = [row.name for name in names for row in TABLES[name].rows]
    for name in options.row or ():
        if name not in known:
            parser.error(f"no row {name!r}; the rows are {', '.join(dict.fromkeys(known))}")
    print_head()
    for name in names:
        table = sized(TABLES[name], options)
        rows = [row for row in table.rows if not options.row or row.name in options.row]
        if not rows:
            continue
        with tempfile.TemporaryDirectory() as folder:
            measure_rows: Callable[..., dict[str, list[Run]]] = measure
            if options.turns:
                measure_rows = partial(measure_in_turns, turn_s=options.turn_seconds)
            runs = measure_rows(
                table,
                rows,
                Path(folder),
                options.turns or table.num_rounds,
                num_workers=options.num_workers,
                cache=options.cache,
                photographs=options.photographs or (),
            )
        print_table(table, [row for row in rows if row.name in runs], runs, options.num_workers)


def sized(table: Table, options: argparse.Namespace) -> Table:
    """Return the table with the requested numbers of samples and rounds."""
    return dataclasses.replace(
        table,
        num_samples=options.samples
        or (12 * table.batch_size if options.quick else table.num_samples),
        num_rounds=options.rounds or (1 if options.quick else table.num_rounds),
    )


def _can_write(name: str, options: argparse.Namespace) -> bool:
    return TABLES[name].corpus != "mixed" or bool(options.photographs)


if __name__ == "__main__":
    main()
