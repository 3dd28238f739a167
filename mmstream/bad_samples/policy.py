"""What a run does about bad samples, and how many it tolerates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from mmstream.wrong_arguments import Fraction, NonNegativeInt, checked

Action: TypeAlias = Literal["substitute", "mask", "raise"]


@checked()
@dataclass(frozen=True)
class BadSamplePolicy:
    """How bad samples are handled, and how many a run tolerates before it stops.

    A sample that fails is read again. It is bad if two reads gave the same bytes, or after eight
    reads. ``decoding/substitute.py`` carries this policy out.

    Samples that a user's filter leaves out (`SkipSample`) are not bad. They are counted apart and
    no limit applies to them. Their rows are masked under "mask" and substituted otherwise.

    Each rank counts its own samples, and each new Loader starts at zero, also after a resume.

    Attributes:
        action: What happens to the row of a bad sample.

            "substitute": the row shows another sample of its window, the same one on every
            topology. "mask": the row shows that sample too, but ``__valid__`` is False, so that no
            sample counts twice. The loss must leave such rows out. "raise": the error of the first
            bad sample stops the run. The state stays before its batch, so a run with another policy
            continues there.
        max_fraction: Limit on bad samples as a share of the delivered ones.
        min_samples: Delivered samples from which on `max_fraction` is judged.
        max_consecutive: Limit on bad samples one after another. Many in a row usually mean a bad
            shard or a wrong decoder. Each source of a mixture is counted by itself. 0 means no
            limit.
        max_length_error_fraction: Limit on samples of packs that are longer than measured and do
            not fit (LengthError), as a share of the delivered ones. It is judged as `max_fraction`
            is, and tight: a measure that is out of date concerns all samples.
        max_samples: Limit on the number of bad samples. None means no limit.
        shards: Whether the samples of an unreadable shard count as bad samples. False: such a shard
            stops the run.
        quarantine: Folder of ``quarantine-rank{r}.jsonl``, made at the first bad sample. None
            writes nothing.

    Raises:
        ConfigError: an unknown action, or a limit out of range.
    """

    action: Action = "substitute"
    max_fraction: Fraction = 0.01
    min_samples: NonNegativeInt = 1000
    max_consecutive: NonNegativeInt = 100
    max_length_error_fraction: Fraction = 0.001
    max_samples: NonNegativeInt | None = None
    shards: bool = False
    quarantine: str | None = "."
