"""``mmstream index | verify | takedown``: they index and check shards, and take samples down.

They do not import torch, but to decode.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import click
import numpy as np

from mmstream.cli.shared import (
    AT_LEAST_1,
    PROBLEM,
    allow_foreign_urls,
    command,
    refuse_given,
    say,
    shows_infos_of,
)
from mmstream.dataset import bad_list
from mmstream.dataset.bad_list import erased_keys, take_down
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.open import open_dataset
from mmstream.dataset.select import having_keys
from mmstream.dataset.verify import bad_samples, verify as find_problems
from mmstream.decoding.bad_samples import quarantined_refs
from mmstream.display.text import count_text
from mmstream.errors import escaped
from mmstream.media.fields import (
    audio_fields,
    image_fields,
    list_of_frame,
    video_fields,
    with_address,
)
from mmstream.media.frames import encoded_video
from mmstream.processes.machine import num_cores
from mmstream.storage.write_lock import write_lock
from mmstream.types import SampleRef


@command("mmstream index s3://bucket/tars --output indexes/")
@click.argument("url")
@click.option(
    "--output",
    metavar="FOLDER",
    help="Folder or URL prefix for the indexes and the manifest.  [default: beside the tars]",
)
@click.option(
    "--checksums",
    is_flag=True,
    help="Also write a checksum of every sample. This reads all bytes of the tars.",
)
@click.option(
    "--columns",
    is_flag=True,
    help="Also write a table of the samples beside each index, for conditions on samples. This "
    "reads all bytes of the tars.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Build existing indexes, checksums and columns again.",
)
@click.option(
    "--num-threads",
    type=AT_LEAST_1,
    default=8,
    show_default=True,
    help="Tars to index at the same time.",
)
def index(url: str, columns: bool, **options: Any) -> None:
    """Index tars at URL that other tools wrote, so that they open quickly.

    Only the tar headers are read: 2 % of the bytes of a local tar with images of 1 MB. With
    --checksums, all bytes are read. Training then notices bytes that have changed since.
    """
    with shows_infos_of("mmstream.dataset.index_tars"):  # how much is read
        report = index_tars(url, **options)
    say(
        f"{count_text(report.num_shards, 'tar')}, {count_text(report.num_samples, 'sample')}; "
        f"{count_text(report.num_built, 'tar')} indexed"
        + f", checksums of {count_text(report.num_summed, 'tar')} written"
        * options["checksums"]
    )
    if columns:
        _write_columns(options["output"] or url, options["overwrite"])
    is_elsewhere = (options["output"] or url).rstrip("/") != url.rstrip("/")
    if is_elsewhere:
        say(
            f"the tars stay in {url}; to open {options['output']}, use --allow-foreign-urls, or in "
            "Python mm.open_dataset(..., allow_foreign_urls=True)"
        )


def _write_columns(url: str, overwrite: bool) -> None:
    """Write the sidecars of the shards that have none."""
    from mmstream.converting.sidecar import write_sidecars  # loads Arrow

    dataset = open_dataset(url, allow_foreign_urls=True)  # they were indexed just now
    num_workers = num_cores() if len(dataset) > MIN_SAMPLES_OF_PROCESSES else 1
    num_written = write_sidecars(dataset, overwrite=overwrite, num_workers=num_workers)
    say(f"columns of {count_text(num_written, 'tar')} written")


MIN_SAMPLES_OF_PROCESSES = 100_000
"""Columns of fewer samples are written before other processes have started."""


@command("mmstream verify s3://bucket/corpus --decode")
@click.argument("url")
@click.option(
    "--decode",
    is_flag=True,
    help="Also decode every image, video and recording, and parse every JSON field.",
)
@click.option("--quick", is_flag=True, help="Only compare the sizes of all files; read no samples.")
@click.option(
    "--write-bad",
    is_flag=True,
    help="List bad samples in mmstream.bad.json beside the data. New runs leave them out.",
)
@click.option(
    "--quarantine",
    multiple=True,
    metavar="FILE",
    help="quarantine-rank0.jsonl of a training run: list its bad samples too. Can be given "
    "several times.",
)
@click.option(
    "--source",
    metavar="NAME",
    help="With --quarantine of a run on a mixture: the name of this dataset in the mixture.",
)
@allow_foreign_urls
def verify(
    url: str,
    decode: bool,
    quick: bool,
    write_bad: bool,
    quarantine: tuple[str, ...],
    source: str | None,
    allow_foreign_urls: bool,
) -> None:
    """Read the whole dataset at URL and check checksums, indexes and every sample.

    The exit code is 1 if there are problems. A line says which checksums there are. With --decode,
    another says which types of fields were decoded, and how many samples have others, which are
    only read. Every frame of a video is decoded, but not its sound.

    --write-bad replaces the list of bad samples, or removes it if no sample is bad. Duplicates that
    `mmstream duplicates --drop` has listed stay on it. --quarantine
    without --write-bad adds to the existing list and reads no data.
    """
    _check_verify_options(decode, write_bad, bool(quarantine), source, quick)
    if quarantine and not write_bad:
        _add_to_bad_list(url, quarantine, source, allow_foreign_urls)
        return
    decoder = _DecodeCheck() if decode else None
    # A list that is written again need not be read; it may even be damaged.
    dataset = open_dataset(url, bad_list=not write_bad, allow_foreign_urls=allow_foreign_urls)
    if write_bad:  # from now on: what is read must be what the list is about
        click.get_current_context().with_resource(write_lock(dataset.index_store, "verify"))
    quarantined = quarantined_refs(quarantine, dataset, source)
    problems = []
    if not len(dataset):
        say("bad: the dataset has no samples")
    for problem in find_problems(dataset, decode=decoder, quick=quick):
        problems.append(problem)
        say(f"bad: {problem.reason}")
    if write_bad:
        bad = bad_samples(dataset, problems).tolist()
        listed = bad_list.write_bad(dataset, [*bad, *quarantined.tolist()])
        num_duplicates = len(bad_list.read_listed(dataset, "duplicates"))
        kept = f", {num_duplicates:,} of them as duplicates, as before" if num_duplicates else ""
        say(f"{len(listed):,} of {len(dataset):,} samples are left out of every epoch{kept}")
    if decoder is not None:
        say(decoder.summary())
    say(_CHECKSUMS[dataset.manifest.checksums], err=True)
    if problems or not len(dataset):
        can_be_listed = any(problem.bad for problem in problems) and not write_bad
        hint = "; to leave the bad samples out of new runs, add --write-bad" * can_be_listed
        say(f"{count_text(len(problems) or 1, 'problem')} in {dataset!r}{hint}", err=True)
        sys.exit(PROBLEM)
    samples, shards = count_text(len(dataset), "sample"), count_text(dataset.num_shards, "shard")
    say(f"ok: {samples} in {shards}")


def _check_verify_options(
    decode: bool, write_bad: bool, quarantine: bool, source: str | None, quick: bool
) -> None:
    if source is not None and not quarantine:
        raise click.UsageError("--source names the source of --quarantine; use both or neither")
    if quick and (decode or write_bad or quarantine):
        raise click.UsageError("--quick reads no samples; use it alone")
    if quarantine and not write_bad and decode:
        raise click.UsageError("--quarantine alone reads no data to decode; add --write-bad")


def _add_to_bad_list(
    url: str, quarantine: tuple[str, ...], source: str | None, allow_foreign_urls: bool
) -> None:
    """Add the samples of quarantine files to the bad list of a dataset."""
    dataset = open_dataset(url, allow_foreign_urls=allow_foreign_urls)
    with write_lock(dataset.index_store, "verify"):
        dataset = open_dataset(url, allow_foreign_urls=allow_foreign_urls)  # as it is now
        quarantined = quarantined_refs(quarantine, dataset, source)
        bad = bad_list.read_listed(dataset, "bad").tolist()
        listed = bad_list.write_bad(dataset, [*bad, *quarantined.tolist()])
    say(
        f"{len(listed):,} of {len(dataset):,} samples are left out of every epoch, "
        f"{len(listed) - len(dataset.corpus.before_takedowns.bad):,} of them from now on"
    )


_CHECKSUMS = {
    "written": "checksums: of every sample, written with the tars",
    "indexed": "checksums: of every sample, of the bytes that the tars had when they were indexed",
    None: "no checksums: bytes that changed but still decode are not noticed; "
    "run `mmstream index --checksums`",
}


class _DecodeCheck:
    """Decodes samples for ``verify --decode``, and counts what it could not decode."""

    def __init__(self) -> None:
        from mmstream.decoding.audio import AudioDecoder
        from mmstream.decoding.image.decoder import ImageDecoder
        from mmstream.decoding.video.decoder import VideoDecoder

        self._image = ImageDecoder()
        # Everything is decoded, and little of it kept. How long that takes is not a fault of a
        # file, and neither is a length of which a run takes but a span.
        self._video = VideoDecoder(
            size=16,
            interpolation="nearest",
            span=None,
            max_frames=_ALL_FRAMES,
            max_decoded_frames=_ALL_FRAMES,
            timeout_s=None,
        )
        self._audio = AudioDecoder(
            sample_rate=8_000, span=None, max_duration_s=self._video.max_duration_s, timeout_s=None
        )
        self._decoded = Counter[str]()
        self._kept = Counter[str]()

    def __call__(self, sample: dict[str, Any]) -> None:
        """Decode a sample, and count each type of its fields once."""
        from mmstream.decoding.sample import PLAIN, parse_fields
        from mmstream.decoding.values import ARRAY_DECODERS

        parsed = parse_fields(sample, PLAIN)
        decoders: dict[str, Callable[[bytes], Any]] = {
            **dict.fromkeys(image_fields(sample), self._image),
            **dict.fromkeys(video_fields(sample), self._video),
            **dict.fromkeys(audio_fields(sample), self._audio),
            **{
                name: ARRAY_DECODERS[extension]
                for name in sample
                if (extension := name.rpartition(".")[2]) in ARRAY_DECODERS
            },
        }
        for name, decode in decoders.items():  # what several of them mean is not judged here
            file: Any = with_address(sample, name, encoded_video, sample, name)
            with_address(sample, name, decode, file)
        types: dict[bool, set[str]] = {False: set(), True: set()}
        for name in sample:
            if not name.startswith("__"):
                is_read = name in decoders or list_of_frame(name) in decoders
                is_kept = parsed[name] is sample[name] and not is_read
                kind = name.rpartition(".")[2]
                types[is_kept].add(name if kind == "json" else kind)  # "v2.json" is not parsed
        self._decoded.update(types[False])
        self._kept.update(types[True])

    def summary(self) -> str:
        """Return one line: which types of fields were decoded, and which were only read."""
        kept = f"; not decoded: {_counts(self._kept)}: nothing here decodes them"
        return f"decoded: {_counts(self._decoded)}{kept if self._kept else ''}"


_ALL_FRAMES = 1 << 40
"""More frames than any video has."""


def _counts(samples_by_type: Counter[str]) -> str:
    """Return the counts of samples by type of field, the most frequent first."""
    counts = sorted(samples_by_type.items(), key=lambda entry: (-entry[1], entry[0]))
    labels = [f"{escaped(name)} ({count_text(count, 'sample')})" for name, count in counts]
    return ", ".join(labels) or "nothing"


@command("mmstream takedown s3://bucket/corpus --keys-file keys.txt --reason 'request 17'")
@click.argument("url")
@click.option("--keys-file", required=True, metavar="FILE", help="Which samples: one key a line.")
@click.option("--by-id", is_flag=True, help="The lines are ids of rows, as the sidecars have them.")
@click.option("--reason", required=True, metavar="TEXT", help="Kept, and shown in messages.")
@click.option(
    "--allow-unknown", is_flag=True, help="Take down those that are there; count the others."
)
@click.option(
    "--erase",
    is_flag=True,
    help="Also overwrite them in the shards, once and for all. Runs must have ended.",
)
@click.option("--yes", is_flag=True, help="With --erase: do not ask.")
@allow_foreign_urls
def takedown(
    url: str,
    keys_file: str,
    by_id: bool,
    reason: str,
    allow_unknown: bool,
    erase: bool,
    yes: bool,
    allow_foreign_urls: bool,
) -> None:
    """Take samples of the dataset at URL down: no run shows them any more.

    That holds for runs that start or resume from now on; states of earlier runs go on. All samples
    with a key are taken down, in whatever shards they are. Their bytes stay in the shards, unless
    --erase overwrites them.
    """
    from mmstream.converting import erase as erasing  # loads Arrow

    if not reason.strip():
        raise click.UsageError("--reason: say why, such as 'request 17'")
    if not erase:
        refuse_given(["yes"], "with --erase")
    dataset = open_dataset(url, bad_list=False, allow_foreign_urls=allow_foreign_urls)
    column: Literal["key", "id"] = "id" if by_id else "key"
    erased = erased_keys(dataset.index_store, column)
    view, unknown = having_keys(
        dataset, keys_file, column=column, allow_unknown=allow_unknown, erased=erased
    )
    refs = view.refs(np.arange(len(view)))
    digests = {}
    if erase:
        erasing.require_erasable(dataset, refs)
        if not yes:
            _ask(dataset, refs)
        digests = erasing.digests_of(dataset, refs)
    count = take_down(dataset, refs, reason, digests)
    if unknown:
        say(f"{count_text(len(unknown), 'line')} of {keys_file} are of no sample", err=True)
    earlier = f"; {len(refs) - count:,} were taken down before" * (count < len(refs))
    say(f"{count_text(count, 'sample')} taken down{earlier}: {escaped(reason)}")
    if not erase:
        return
    shards = []
    for shard in erasing.erase(dataset):
        shards.append(shard)
        say(f"{shard.name}: {count_text(shard.num_samples, 'sample')} erased, sha256")
        say(f"  before {shard.before}")
        say(f"  after  {shard.after}")
    say(f"not touched: {erasing.UNTOUCHED}" if shards else "all of them were erased before")


def _ask(dataset: Dataset, refs: Sequence[SampleRef]) -> None:
    """Ask whether samples may be erased, and stop if they may not."""
    if not sys.stdin.isatty():
        raise click.UsageError("--erase asks, and this is not a terminal: pass --yes")
    shards = count_text(len({shard for shard, _ in refs}), "shard")
    click.confirm(
        f"{count_text(len(refs), 'sample')} in {shards} of {escaped(dataset.store.url)} will "
        "be overwritten for ever. Have all runs that read them ended?",
        abort=True,
    )
