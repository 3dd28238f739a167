"""How exactly a mixture keeps its weights, over 1,000 planned steps on small real corpora.

    python -m tools.bench.mixture

Converts the demo's corpus three times into a temporary folder: its captions, a conversation about
each photograph, and ten of these conversations. Then it mixes the three and counts the planned rows
of each source. It reads no sample and takes about 10 seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import mmstream as mm
from mmstream.demo.demo import corpus_rows
from tools.bench.conversations import conversations_of

WEIGHTS = {"captions": 0.7, "chats": 0.25, "rare": 0.05}
NUM_STEPS, GLOBAL_BATCH_SIZE = 1000, 32


class Row(NamedTuple):
    """The counts of one source."""

    source: str
    num_samples: int
    weight: float
    due: float
    """weight * planned rows."""
    planned: int
    largest_difference: float
    """Between planned rows and weight * rows, after any step."""
    rows_per_batch: str
    """Fewest and most."""
    visits_per_sample: str
    """Fewest and most."""


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(table(count(mm.open_mixture(write_corpora(Path(folder))))))


def write_corpora(folder: Path) -> Path:
    """Write three corpora and the file that mixes them, and return the path of the file."""
    rows = Path(corpus_rows())
    captions = [json.loads(line) for line in rows.read_text().splitlines()]
    chats = list(conversations_of(captions))
    each = mm.RowReading(captions="each")
    mm.convert(rows, folder / "captions", reading=each, num_workers=0, progress=False)
    for name, conversations in (("chats", chats), ("rare", list(islice(chats, 10)))):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in conversations))
        mm.convert(path, folder / name, media_root=rows.parent, num_workers=0, progress=False)
    sources = {name: {"url": name, "weight": weight} for name, weight in WEIGHTS.items()}
    file = folder / "mix.json"
    file.write_text(json.dumps({"sources": sources, "epoch_steps": 250}, indent=2))
    return file


def count(mixture: mm.Mixture, num_steps: int = NUM_STEPS) -> list[Row]:
    """Plan the first steps of a run and count the rows of each source."""
    order = mm.Pipeline(mixture, global_batch_size=GLOBAL_BATCH_SIZE, seed=0).order
    fractions = mixture.fractions[0]
    counts = Counter[str]()
    visits = Counter[tuple[int, int]]()
    largest_difference = dict.fromkeys(fractions, 0.0)
    fewest = dict.fromkeys(fractions, GLOBAL_BATCH_SIZE)
    most = dict.fromkeys(fractions, 0)
    for number in range(num_steps):
        refs = order.refs(*divmod(number, order.steps_per_epoch))
        batch = Counter(mixture.locate(shard)[0] for shard in refs.shard.tolist())
        counts += batch
        visits.update(zip(refs.shard.tolist(), refs.index.tolist(), strict=True))
        for name, fraction in fractions.items():
            difference = abs(counts[name] - fraction * (number + 1) * GLOBAL_BATCH_SIZE)
            largest_difference[name] = max(largest_difference[name], difference)
            fewest[name] = min(fewest[name], batch[name])
            most[name] = max(most[name], batch[name])
    rows = []
    for name, dataset in mixture.datasets.items():
        counted = [n for (shard, _), n in visits.items() if mixture.locate(shard)[0] == name]
        fewest_visits = min(counted) if len(counted) == len(dataset) else 0
        rows.append(
            Row(
                name,
                len(dataset),
                fractions[name],
                fractions[name] * num_steps * GLOBAL_BATCH_SIZE,
                counts[name],
                largest_difference[name],
                f"{fewest[name]} to {most[name]}",
                f"{fewest_visits} to {max(counted)}",
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    """Return the counts as a table in Markdown."""
    lines = [
        "| source | samples | weight | due | rows | largest difference | rows per batch "
        "| visits per sample |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.source} | {row.num_samples} | {row.weight:g} | {row.due:,.0f} "
        f"| {row.planned:,} | {row.largest_difference:.1f} | {row.rows_per_batch} "
        f"| {row.visits_per_sample} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
