"""How exactly a mixture keeps its weights: counts of 1,000 planned steps, on small real corpora.

    python -m tools.bench.mixture

Converts the embedded corpus three ways into a temporary folder (its captions, a conversation about
each photograph, ten of these), mixes them by a file and counts. Reads no sample: 10 seconds.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import mmstream as mm
from mmstream.converting.captions import conversations_of
from mmstream.demo.demo import corpus_rows

WEIGHTS = {"captions": 0.7, "chats": 0.25, "rare": 0.05}
NUM_STEPS, GLOBAL_BATCH_SIZE = 1000, 32


class Row(NamedTuple):
    """What became of one source."""

    source: str
    num_samples: int
    weight: float
    wanted: float
    drawn: int
    largest: float
    """Difference of count and weight * rows, after any step."""
    of_batch: str
    """Fewest and most rows of a batch."""
    visits: str
    """Fewest and most times that a sample came."""


def write_corpora(folder: Path) -> Path:
    """Write three corpora and the file that mixes them; return the file."""
    rows = Path(corpus_rows())
    captions = [json.loads(line) for line in rows.read_text().splitlines()]
    chats = list(conversations_of(captions))
    mm.convert(rows, folder / "captions", captions="each", num_workers=0, progress=False)
    for name, some in (("chats", chats), ("rare", list(islice(chats, 10)))):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in some))
        mm.convert(path, folder / name, media_root=rows.parent, num_workers=0, progress=False)
    sources = {name: {"url": name, "weight": weight} for name, weight in WEIGHTS.items()}
    file = folder / "mix.json"
    file.write_text(json.dumps({"sources": sources, "epoch_steps": 250}, indent=2))
    return file


def count(mixture: mm.Mixture, num_steps: int = NUM_STEPS) -> list[Row]:
    """Plan the first steps of a run and count what comes of each source."""
    order = mm.Pipeline(mixture, global_batch_size=GLOBAL_BATCH_SIZE, seed=0).order
    fractions = mixture.fractions[0]
    counts, visits = Counter[str](), Counter[tuple[int, int]]()
    largest, in_batch = (
        dict.fromkeys(fractions, 0.0),
        {name: [GLOBAL_BATCH_SIZE, 0] for name in fractions},
    )
    for at in range(num_steps):
        refs = order.refs(*divmod(at, order.steps_per_epoch))
        drawn = Counter(mixture.locate(shard)[0] for shard in refs.shard.tolist())
        counts += drawn
        visits.update(zip(refs.shard.tolist(), refs.index.tolist(), strict=True))
        for name, fraction in fractions.items():
            off = abs(counts[name] - fraction * (at + 1) * GLOBAL_BATCH_SIZE)
            largest[name] = max(largest[name], off)
            few, many = in_batch[name]
            in_batch[name] = [min(few, drawn[name]), max(many, drawn[name])]
    rows = []
    for name, dataset in mixture.datasets.items():
        mine = [n for (shard, _), n in visits.items() if mixture.locate(shard)[0] == name]
        fewest = min(mine) if len(mine) == len(dataset) else 0
        rows.append(Row(
            name, len(dataset), fractions[name], fractions[name] * num_steps * GLOBAL_BATCH_SIZE,
            counts[name], largest[name], "{} to {}".format(*in_batch[name]),
            f"{fewest} to {max(mine)}",
        ))  # fmt: skip
    return rows


def table(rows: list[Row]) -> str:
    """Return Markdown."""
    lines = [
        "| source | samples | weight | due | rows | most off | per batch | visits |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.source} | {row.num_samples} | {row.weight:g} | {row.wanted:,.0f} | {row.drawn:,} "
        f"| {row.largest:.1f} | {row.of_batch} | {row.visits} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(table(count(mm.open_mixture(write_corpora(Path(folder))))))
