"""Random unions: several datasets that are opened as one, of which the last grows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import accumulate

from tools.prove.random_runs.corpus import Corpus, Ref, append_shards, write_corpus


@dataclass
class Union(Corpus):
    """Datasets whose shards stand one behind another."""

    parts: list[Corpus] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    """The number of the first shard of each."""

    def add(self, draw: random.Random, prefix: str, bad_fraction: float) -> None:
        """Write one more dataset at the end, sometimes in a folder with a name that is taken."""
        number, like = len(self.parts), self.parts[0]
        self.parts += [
            write_corpus(
                self.folder
                / f"{like.folder.name}-other{number}"
                / draw.choice(["", like.folder.name]),
                draw,
                prefix=f"{prefix}+{number}",
                has_wavs=like.has_wavs,
                bad_fraction=bad_fraction,
                max_shards=3,
                has_columns=like.has_columns,
                has_checksums=like.has_checksums,
            )
        ]
        self.refresh()

    def refresh(self) -> None:
        """Take over what was written into the parts."""
        self.firsts = list(accumulate((len(part.shards) for part in self.parts), initial=0))
        folders = [part.folder.name for part in self.parts]
        self.shards = []
        for number, (part, first) in enumerate(zip(self.parts, self.firsts, strict=False)):
            count = folders[: number + 1].count(folders[number])
            prefix = folders[number] + f"-{count}" * (count > 1)
            self.shards += [replace(shard, name=f"{prefix}/{shard.name}") for shard in part.shards]
            self.samples |= {(first + s, i): known for (s, i), known in part.samples.items()}
            self.listed |= {(first + s, i) for s, i in part.listed}
        self.names, self.shown = [shard.name for shard in self.shards], self.shards

    def show(self, num_shards: int) -> None:
        """Write manifests of so many shards. Parts without any are not opened."""
        self.shown = self.shards[:num_shards]
        for part, first in zip(self.parts, self.firsts, strict=False):
            part.show(max(0, num_shards - first))

    def place(self, storage: str) -> list[str]:
        """Return the folders of what is shown."""
        return [str(part.place(storage)) for part in self.parts if part.shown]

    def split(self, refs: set[Ref]) -> list[tuple[Corpus, set[Ref]]]:
        """Return the datasets that are shown, with those of some samples that are theirs."""
        return [
            (part, {(s - first, i) for s, i in refs if first <= s < first + len(part.shards)})
            for part, first in zip(self.parts, self.firsts, strict=False)
            if part.shown
        ]


def grow(corpus: Corpus, draw: random.Random, kinds: random.Random) -> None:
    """Append shards to a dataset or to the last one of a union, or a dataset to a union."""
    if isinstance(corpus, Union) and kinds.random() < 0.4:
        corpus.add(kinds, "more", 0.1)
        return
    append_shards(corpus.parts[-1] if isinstance(corpus, Union) else corpus, draw, 2, "more", 0.1)
    if isinstance(corpus, Union):
        corpus.refresh()
