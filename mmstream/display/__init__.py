"""What notebooks show of datasets, samples, batches, pipelines and loaders.

Beside the path of the data: the classes' ``_repr_html_`` call in here, and `show` does the same for
samples and batches, which are plain dicts. Output is bounded, whatever the corpus holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mmstream.dataset.mixture import Mixture
from mmstream.display.contents import (
    MAX_FIELDS,
    batch_pictures,
    describe,
    field_table,
    messages_of,
    pictures_of,
    row_of,
    text_of,
)
from mmstream.display.markup import (
    AUDIO_TYPES,
    QUIET,
    html_text,
    page,
    picture,
    player,
    size_text,
    table,
)
from mmstream.display.mixtures import named, rows_of_sources, sources_table
from mmstream.errors import ConfigError, MMStreamError

__all__ = [
    "Shown",
    "batch_html",
    "batch_sheet",
    "dataset_html",
    "loader_html",
    "pipeline_html",
    "sample_html",
    "samples_html",
    "show",
    "view_html",
]

MAX_TILES = 16
MAX_PICTURES = 12
"""Of one sample."""
MAX_TURNS = 20
PREVIEW_SAMPLES = 6
MAX_PREVIEW_BYTES = 32 * 2**20
"""What showing a dataset may read: no previews of a corpus of long videos."""


@dataclass(frozen=True)
class Shown:
    """Something to look at: HTML where a notebook asks for it, a line of text elsewhere."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def show(value: Any) -> Shown:
    """Return something that a notebook displays.

    Args:
        value: a sample (raw or decoded), a list of samples (`Pipeline.take`), a batch (on the host
            or a device), or a Dataset, a slice of one, a Mixture, a Pipeline or a Loader.

    Raises:
        ConfigError: nothing that can be shown.
    """
    if hasattr(value, "_repr_html_"):
        return Shown(value._repr_html_(), repr(value))
    if isinstance(value, Mapping) and isinstance(value.get("__key__"), str):
        return Shown(sample_html(value), describe(value))
    if isinstance(value, Mapping) and isinstance(value.get("__key__"), list):
        return Shown(batch_html(value), describe(value))
    if isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value):
        return Shown(page(samples_html(value)), "\n".join(describe(item) for item in value))
    raise ConfigError(
        "show: a sample, a list of samples, a batch, a Dataset, a Mixture, a Pipeline or a Loader, "
        f"not {type(value).__name__}"
    )


def dataset_html(dataset: Any) -> str:
    """Return what a dataset holds, and its first samples as thumbnails."""
    manifest, counts = dataset.manifest, dataset.counts
    per_shard = f"{counts.min():,} to {counts.max():,} samples" if counts.size else "none"
    bad = f", of these {len(dataset.bad):,} known to be bad" if len(dataset.bad) else ""
    rows = [
        ("where", html_text(dataset.store.url)),
        ("samples", f"{len(dataset):,}{bad}"),
        ("shards", f"{dataset.num_shards:,} of {per_shard}"),
        ("bytes", size_text(manifest.num_bytes)),
    ]
    fields = ", ".join(f"{n} ({c:,})" for n, c in islice(manifest.fields.items(), MAX_FIELDS))
    if fields:
        rows.append(("fields", html_text(fields)))
    return page("<b>Dataset</b>", table(rows), _preview(dataset, dataset, PREVIEW_SAMPLES))


def view_html(view: Any) -> str:
    """Return a slice of a dataset: its first samples as thumbnails."""
    head = f"<b>{len(view):,} samples</b> of {html_text(repr(view.dataset))}"
    more = max(0, len(view) - MAX_TILES)
    left = f'<div style="{QUIET}">... {more:,} more</div>' if more else ""
    return page(head, _preview(view, view.dataset, MAX_TILES), left)


def samples_html(samples: Iterable[Any]) -> str:
    """Return samples side by side, each with its first picture and the start of its text."""
    tiles = []
    for sample in islice(samples, MAX_TILES):
        if isinstance(sample, Exception):
            tiles.append(_tile(f'<span style="color:#b00020">{html_text(sample, 200)}</span>'))
            continue
        pictures = pictures_of(sample)
        first = next(iter(pictures.items()), None)
        shown = "" if first is None else picture(first[1], 144, sample["__key__"])
        more = f'<div style="{QUIET}">{len(pictures)} images</div>' if len(pictures) > 1 else ""
        tiles.append(_tile(shown, more, html_text(text_of(sample), 110), key=named(sample)))
    return _sheet(tiles)


def sample_html(sample: Mapping[str, Any]) -> str:
    """Return one sample whole: pictures, text, conversation with its images inline, audio."""
    lineage = sample.get("__lineage__")
    shard = str(sample.get("__url__", "")).rpartition("/")[2]
    where = f"{shard}[{lineage.index}]" if lineage is not None else shard
    parts = [f'<b>{html_text(named(sample))}</b> <span style="{QUIET}">{html_text(where)}</span>']
    pictures, messages = pictures_of(sample), messages_of(sample)
    if not messages:
        shown = [picture(v, 288, n) for n, v in islice(pictures.items(), MAX_PICTURES)]
        parts.append(_sheet([f"<div>{item}</div>" for item in shown]))
    if isinstance(sample.get("txt"), str | bytes):
        parts.append(
            f'<div style="max-width:60em;white-space:pre-wrap">'
            f"{html_text(sample['txt'], 2000)}</div>"
        )
    parts += [_turn(turn, sample, pictures) for turn in messages[:MAX_TURNS]]
    if len(messages) > MAX_TURNS:
        parts.append(f'<div style="{QUIET}">... {len(messages) - MAX_TURNS} more turns</div>')
    if not messages:
        sounds = [(n, v) for n, v in sample.items() if _is_audio(n, v)]
        parts += [f"<div>{player(name, data)}</div>" for name, data in sounds[:4]]
    return page(*parts, field_table(sample))


def batch_html(batch: Mapping[str, Any]) -> str:
    """Return a batch: a contact sheet of its rows with their texts, and its fields."""
    num_rows, lineage = len(batch["__key__"]), batch.get("__lineage__")
    head = f"<b>Batch of {num_rows}</b>{html_text(rows_of_sources(batch), 300)}"
    if lineage:
        rows = f"rows {lineage.start} to {lineage.start + num_rows - 1} of the global batch"
        where = f"epoch {lineage.epoch}, step {lineage.step}, {rows}"
        head += f' <span style="{QUIET}">{where}</span>'
    left = num_rows - MAX_TILES
    more = f'<div style="{QUIET}">... {left} more rows</div>' if left > 0 else ""
    return page(head, batch_sheet(batch), more, field_table(batch))


def batch_sheet(batch: Mapping[str, Any]) -> str:
    """Return the contact sheet of a batch; substitutes and padding are marked."""
    keys, lineage = batch["__key__"], batch.get("__lineage__")
    valid = batch["__valid__"].tolist() if "__valid__" in batch else [True] * len(keys)
    start = lineage.start if lineage else 0
    bad = {record.row - start: record.reason for record in lineage.bad} if lineage else {}
    pictures = batch_pictures(batch)
    tiles = []
    for row in range(min(len(keys), MAX_TILES)):
        side = 144 if len(pictures[row]) == 1 else 68
        shown = " ".join(picture(value, side, keys[row]) for value in pictures[row][:4])
        note = "" if valid[row] else "not valid: padding"
        if row in bad:
            note = f"substitute for {bad[row]}" if valid[row] else f"not valid: {bad[row]}"
        warning = f'<span style="color:#b06000">{html_text(note, 150)}</span>' if note else ""
        text = html_text(text_of({name: row_of(value, row) for name, value in batch.items()}), 110)
        tiles.append(_tile(shown, warning, text, key=named(batch, row)))
    return _sheet(tiles)


def pipeline_html(pipeline: Any) -> str:
    """Return what a pipeline does, a line a stage; nothing is read."""
    order, decode = pipeline.order, pipeline.decode
    names = [getattr(f, "__name__", type(f).__name__) for f in pipeline.transforms]
    groups, lanes = order.grid
    mixing = (
        f"shuffled, {groups} x {lanes} lanes, {_windows(order)}"
        if pipeline.shuffle
        else "in the corpus' own order"
    )
    mixed = isinstance(pipeline.dataset, Mixture)
    last = "left out" if pipeline.drop_last else "one more, padded step"
    last = "" if mixed else f"; left-over samples: {last}"
    steps = f"{order.steps_per_epoch:,} steps of {order.global_batch_size} an epoch, {mixing}"
    policy = pipeline.bad_samples
    done = {"substitute": "substituted", "mask": "masked"}.get(policy.action, "")
    limits = (
        f"{done}; the run stops above {100 * policy.max_fraction:g} % or "
        f"{policy.max_consecutive} in a row"
        if done
        else "the first one stops the run"
    )
    rows = [
        ("dataset", html_text(repr(pipeline.dataset))),
        ("order", html_text(f"{steps}, seed {pipeline.seed}{last}")),
        ("decode", html_text(decode_text(decode))),
        ("transforms", html_text(", ".join(names) or "none")),
        ("batch", html_text(getattr(pipeline.collate, "__name__", "collate"))),
        ("bad samples", limits),
    ]
    sources = sources_table(pipeline.dataset, order) if mixed else ""
    return page("<b>Pipeline</b>", table(rows), sources)


def _windows(order: Any) -> str:
    identity = order.identity()
    if "sources" not in identity:
        return f"windows of {identity['window']:,}"
    return "windows of " + ", ".join(f"{s['window']:,} ({s['name']})" for s in identity["sources"])


def decode_text(decode: Any) -> str:
    """Return which decoders a pipeline has, in words."""
    parts = []
    if decode is not None and decode.image is not None:
        parts.append(f"images to {decode.image.size or 'their own size'}")
    if decode is not None and decode.text is not None:
        parts.append(
            f"text to at most {decode.text.max_length} tokens, padded to {decode.text.padding}"
        )
    return "; ".join(parts) or "json is parsed, other fields stay bytes"


def loader_html(loader: Any) -> str:
    """Return where a loader stands and what it has delivered."""
    state, stats = loader.state_dict(), loader.stats
    bad = ", ".join(f"{count} {kind}" for kind, count in stats.bad.items()) or "none"
    place = f"epoch {state['epoch']}, step {state['step']:,} of {len(loader):,}"
    bar = f'<progress max="{len(loader)}" value="{state["step"]}" style="width:18em"></progress>'
    rows = [
        ("stands at", f"{place} {bar}"),
        ("workers", str(loader.num_workers)),
        ("delivered", f"{stats.num_steps:,} steps, {stats.num_samples:,} samples of this rank"),
        ("read", f"{size_text(stats.num_bytes)} in {stats.num_requests:,} ranges"),
        ("waited for", f"{stats.wait_s:.1f} s"),
        ("bad samples", html_text(bad)),
    ]
    return page("<b>Loader</b>", table(rows))


def _preview(samples: Sequence[Any], dataset: Any, most: int) -> str:
    """Return the first samples as tiles, as many as may be read; the bad ones say why."""
    mean_bytes = max(1, dataset.manifest.num_bytes // max(1, len(dataset)))
    fitting = min(most, MAX_PREVIEW_BYTES // mean_bytes, len(samples))

    def read(number: int) -> Any:
        try:
            return samples[number]
        except (MMStreamError, OSError) as error:
            return error

    return samples_html(map(read, range(fitting)))


def _tile(*parts: str, key: str = "") -> str:
    name = f'<div style="{QUIET};font-size:11px">{html_text(key, 40)}</div>' if key else ""
    style = "width:144px;overflow-wrap:anywhere;font-size:12px;line-height:1.35"
    return f'<div style="{style}">{"".join(map(_line, parts))}{name}</div>'


def _line(part: str) -> str:
    return f"<div>{part}</div>" if part else ""


def _sheet(tiles: Sequence[str]) -> str:
    style = "display:flex;flex-wrap:wrap;gap:12px;margin:8px 0"
    return f'<div style="{style}">{"".join(tiles)}</div>' if tiles else ""


def _turn(turn: Mapping[str, Any], sample: Mapping[str, Any], pictures: Mapping[str, Any]) -> str:
    """Return one message as a bubble; media parts show the sample's field that they name."""
    role, content = str(turn.get("role", "?")), turn.get("content", "")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    shown = []
    for part in parts:
        field = part.get("field") if isinstance(part, Mapping) else None
        data = sample.get(field) if isinstance(field, str) else None
        if isinstance(field, str) and field in pictures:
            shown.append(f"<div>{picture(pictures[field], 224, field)}</div>")
        elif isinstance(field, str) and isinstance(data, bytes):
            shown.append(f"<div>{player(field, data)}</div>")
        else:
            text = part.get("text", part) if isinstance(part, Mapping) else part
            shown.append(html_text(text, 1500))
    tint = "rgba(70,130,220,.14)" if role == "assistant" else "rgba(128,128,128,.12)"
    indent = "3em" if role == "assistant" else "0"
    style = (
        f"background:{tint};border-radius:8px;padding:6px 10px;margin:6px 0 6px {indent};"
        "max-width:48em;white-space:pre-wrap"
    )
    return (
        f'<div style="{style}"><div style="{QUIET};font-size:11px">{html_text(role, 30)}</div>'
        f"{''.join(shown)}</div>"
    )


def _is_audio(name: str, value: Any) -> bool:
    return name.rpartition(".")[2] in AUDIO_TYPES and isinstance(value, bytes)
