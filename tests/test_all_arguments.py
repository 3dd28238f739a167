"""Every public class and function, with wrong values for each of its arguments: named errors.

And the errors of mistakes that people make, which say in one line what to write.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainingArguments, WhisperFeatureExtractor

import mmstream as mm
from mmstream import model_inputs
from mmstream.train import (
    LoaderTrainer,
    TrainConfig,
    check_packing,
    flash_attention_arguments,
    flex_block_mask,
    megatron_packing,
    preference_inputs,
    torchtitan_batch,
)
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import write_corpus

DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]

WRONG: tuple[Any, ...] = (
    *("x", "", "a\0b", "a\ud800b", "²", "a\nb", "x" * 5000, b"x", Path("a\0b"), Path("absent")),
    *(1.5, 1e300, math.nan, math.inf, -math.inf, -1, 0, 10**30, -(10**30), 10**400, True, None),
    *((), (0.0, 3.0), (1, 2, 3), [None], [""], ["a\0b"], DEEP, {}, {"a": "b"}, {1: 2}, {"": 1}),
    *(range(3), iter(()), object, len, object(), mm.ImageDecoder, {1}, np.True_, np.zeros((2, 2))),
    *(np.int64(1), np.float32("nan"), np.array([1.5]), torch.tensor(1.5), torch.ones(2)),
)
"""Each is wrong for most arguments, and right for a few."""

Arguments = dict[str, Any]


@pytest.fixture(scope="module")
def needed(tmp_path_factory: pytest.TempPathFactory) -> dict[Callable[..., Any], Arguments]:
    """The public callables, and the arguments that they need."""
    folder = str(tmp_path_factory.mktemp("corpus"))
    write_corpus(folder, [4], lambda n: {"txt": b"one two"})
    dataset, tokenizer = mm.open_dataset(folder), byte_tokenizer()
    decode = mm.Decode(text=mm.TextDecoder(tokenizer))
    pipeline = mm.Pipeline(dataset, global_batch_size=2, decode=decode)
    loader = mm.Loader(pipeline)
    batch = next(iter(loader))
    flat = mm.Pipeline(dataset, global_batch_size=2, decode=decode, batching=mm.Flat())
    flat_batch = next(iter(mm.Loader(flat)))
    mm.plan(pipeline, 64, name="p", progress=False)
    mm.convert([{"text": "a"}], f"{folder}/rows", progress=False)
    trainer_arguments = TrainingArguments(folder, report_to=[], use_cpu=True)

    def loader_trainer(
        train_dataset: Any, eval_dataset: Any = None, data_collator: Any = None
    ) -> Any:
        given = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        return LoaderTrainer(
            torch.nn.Linear(1, 1), trainer_arguments, data_collator=data_collator, **given
        )

    mixture = Path(folder, "mixture.json")
    mixture.write_text('{"sources": {"a": {"url": ".", "weight": 1}}, "stop": "all"}')
    quiet = {"progress": False}
    special: dict[Callable[..., Any], Arguments] = {
        TrainConfig: {"url": folder, "out": folder},
        loader_trainer: {"train_dataset": loader},
        mm.Boxes: {"source": "json.boxes"},
        mm.ImageDecoder: {"size": 8},
        mm.Loader: {"pipeline": pipeline},
        mm.Mixture: {"sources": {"a": (dataset, 1)}, "stop": "all"},
        mm.Normalize: {"mean": 0.5, "std": 0.5},
        mm.Order.from_counts: {"counts": [4, 4], "global_batch_size": 2},
        mm.Order.from_identity: {"identity": loader.state_dict()["order"], "counts": [4]},
        mm.Pack: {"max_tokens": 64},
        mm.PackLimits: {"max_tokens": 64},
        mm.Pipeline: {"dataset": dataset, "global_batch_size": 2},
        mm.Points: {"source": "json.points"},
        mm.families.qwen_vl.QwenVLPositions: {
            "image_token_id": 1,
            "video_token_id": 2,
            "patch_size": 14,
        },
        mm.Splitting: {"splits": {"a": 1.0}},
        mm.TextDecoder: {"tokenizer": tokenizer},
        mm.Times: {"source": "json.times", "follows": "video"},
        mm.VideoDecoder: {"size": 8},
        mm.bake: {"pipeline": pipeline, "dest": "baked", **quiet},
        mm.collate: {"samples": [{"txt": b"a"}]},
        mm.cut_sequence: {"batch": flat_batch, "rank": 0, "size": 1},
        mm.convert: {"rows": [{"text": "a"}], "dest": "converted", **quiet},
        mm.finalize: {"dest": f"{folder}/rows"},
        mm.families.of: {"model": "llama"},
        mm.families.whisper.WhisperFeatures: {},
        mm.find_duplicates: {"dataset": dataset, **quiet},
        mm.find_leaks: {"a": dataset, "b": dataset, **quiet},
        mm.one_segment: {"sample": dataset[0]},
        mm.open_dataset: {"source": folder},
        mm.Mixture.open: {"path": str(mixture)},
        mm.plan: {"pipeline": pipeline, "limits": 64, **quiet},
        mm.Buckets: {"column": "width", "edges": [2, 4]},
        mm.processor_collate: {"processor": WhisperFeatureExtractor(), "text": False},
        mm.reshard: {"source": folder, "dest": "packs", "plan": "p", **quiet},
        mm.sample_rng: {"sample": dataset[0]},
        mm.show: {"value": dataset},
        mm.shift_labels: {"batch": flat_batch},
        mm.split_rows: {"batch": batch, "num_parts": 2},
        mm.statistics: {"dataset": dataset},
        mm.to_device: {"loader": loader, "device": "cpu"},
        pipeline.take: {"num_samples": 1},
        pipeline.as_webdataset: {},
        loader.load_state_dict: {"state": loader.state_dict()},
        loader.mark_delivered: {"batch": batch},
        dataset.__getitem__: {},
        dataset[1:].__getitem__: {},
        dataset.find: {},
        mm.show(dataset[0]).save: {"path": "page.html"},
        flash_attention_arguments: {"batch": flat_batch},
        flex_block_mask: {"batch": flat_batch},
        megatron_packing: {"batch": flat_batch},
        model_inputs: {"batch": batch, "model_or_family": "llama"},
        preference_inputs: {"batch": flat_batch, "pad_token_id": 0},
        torchtitan_batch: {"batch": flat_batch},
        check_packing: {"model": None, "batch": batch},
    }
    names = [name for name in mm.__all__ if name not in MADE_BY_MMSTREAM]
    others = [each for each in (getattr(mm, name) for name in names) if callable(each)]
    modules = filter(inspect.ismodule, vars(mm.families).values())
    others += [
        getattr(module, name)
        for module in modules
        for name in vars(module)
        if name.endswith(("image_length", "video_length", "audio_length", "Tiles"))
    ]
    errors = [each for each in others if inspect.isclass(each) and issubclass(each, Exception)]
    makers = [
        getattr(each, name)
        for each in filter(inspect.isclass, others)
        for name, value in vars(each).items()
        if isinstance(value, classmethod)
    ]
    return {each: {} for each in (*others, *makers) if each not in errors} | special


MADE_BY_MMSTREAM = {"Dataset", "LazyBytes", "Order"}
"""Users read these and do not make them."""


@pytest.mark.slow
def test_wrong_values_are_errors_of_one_line_with_a_name(
    needed: dict[Callable[..., Any], Arguments], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    raw = []
    for public, arguments in needed.items():
        for name in inspect.signature(public).parameters:
            for value in WRONG if name != "settings" else ():
                raw += raw_errors(public, name, {**arguments, name: value})
    assert not raw, "\n".join(raw)


WRONG_SETTINGS: list[tuple[Callable[..., Any], Arguments, dict[str, list[Any]]]] = [
    (
        mm.BadSamplePolicy,
        {},
        {
            "max_fraction": [1.5, -1],
            "min_samples": [-1],
            "max_consecutive": [-1],
            "max_samples": [-1],
            "action": ["ignore", None],
        },
    ),
    (
        mm.Boxes,
        {"source": "json", "format": "xyxy"},
        {"format": ["yolo"], "units": ["percent"], "to_units": ["x"], "source": [""]},
    ),
    (mm.Times, {"source": "json", "follows": "mp4"}, {"source": [""], "origin": ["clip"]}),
    (
        mm.families.whisper.WhisperFeatures,
        {},
        {"num_mels": [0], "chunk_s": [0.5], "padding": ["zeros"]},
    ),
    (
        mm.families.llava.next_image_length,
        {},
        {"patch_size": [None, 0]},
    ),
]


@pytest.mark.parametrize(("public", "arguments", "wrong"), WRONG_SETTINGS)
def test_a_value_out_of_bounds_is_refused_by_name(
    public: Callable[..., Any], arguments: Arguments, wrong: dict[str, list[Any]]
) -> None:
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(mm.ConfigError, match=name):
                public(**{**arguments, name: value})


def raw_errors(public: Callable[..., Any], name: str, arguments: Arguments) -> list[str]:
    value = arguments[name]
    shown = "a list" if isinstance(value, list) else repr(value)[:20].replace("\n", " ")
    call = f"{public.__qualname__}({name}={shown})"
    try:
        made = public(**arguments)
    except mm.ConfigError as error:
        is_one_line = str(error).isprintable() and len(str(error)) < 1000
        return [] if is_one_line else [f"{call}: {str(error)[:200]!r}"]
    except (mm.MMStreamError, FileNotFoundError):
        return []
    except Exception as error:
        kinds = (f"{kind.__name__}: " for kind in type(error).__mro__)
        if any(kind in (public.__doc__ or "") for kind in kinds):  # it says when it raises that
            return []
        return [f"{call}: {type(error).__name__}: {str(error)[:150]}"]
    if isinstance(made, mm.Loader):
        made.close()
    return []


# -- errors that say what to write ----------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    folder = tmp_path_factory.mktemp("arguments")
    write_corpus(folder, [4])
    return mm.open_dataset(folder)


def pipeline(dataset: mm.Dataset, **settings: Any) -> mm.Pipeline:
    return mm.Pipeline(dataset, **{"global_batch_size": 2, **settings})


def to_device(dataset: mm.Dataset, *arguments: Any, **settings: Any) -> object:
    return mm.to_device(mm.Loader(pipeline(dataset)), *arguments, **settings)


CALLS: dict[str, Callable[[Any], object]] = {
    "source=3: pass a folder, a URL": lambda _: mm.open_dataset(3),  # type: ignore[arg-type]
    r"source=\[None\]: pass a folder, a URL": lambda _: mm.open_dataset([None]),  # type: ignore[list-item]
    "source=<Dataset .*>: pass a folder": lambda dataset: mm.open_dataset(dataset),
    "no-such-store://: .*; give a local folder, or a URL of s3": lambda _: mm.open_dataset(
        "no-such-store://a/b"
    ),
    r"dataset='corpus/': give mm.open_dataset\(...\)": lambda _: mm.statistics("corpus/"),  # type: ignore[arg-type]
    "bad_samples='mask': pass mm.BadSamplePolicy": lambda dataset: pipeline(
        dataset, bad_samples="mask"
    ),
    "Pipeline has no batch_size=: write global_batch_size=": lambda dataset: pipeline(
        dataset, batch_size=2
    ),
    "ImageDecoder has no device=: the CPU decodes; leave it out, and": lambda _: mm.ImageDecoder(
        device="cuda"  # type: ignore[call-arg]
    ),
    "VideoDecoder has no device=: the CPU decodes; leave it out, and": lambda _: mm.VideoDecoder(
        device="cuda"  # type: ignore[call-arg]
    ),
    "to_device has no decode_jpegs=: the loader's workers decode": lambda dataset: to_device(
        dataset,
        "cpu",
        decode_jpegs=len,  # type: ignore[call-arg]
    ),
    "to_device has no decode_clip=: the loader's workers decode": lambda dataset: to_device(
        dataset,
        "cpu",
        decode_clip=len,  # type: ignore[call-arg]
    ),
    "Decode has no images=: write image=mm.ImageDecoder": lambda _: mm.Decode(images=224),  # type: ignore[call-arg]
    r"convert has no format=: write reading=mm.RowReading\(format=": lambda _: mm.convert(
        "rows.jsonl",
        "corpus/",
        format="llava",  # type: ignore[call-arg]
    ),
    r"convert has no check=: write rerun=mm.Rerun\(check=": lambda _: mm.convert(
        "rows.jsonl",
        "corpus/",
        check=True,  # type: ignore[call-arg]
    ),
    r"reading='llava': pass mm.RowReading": lambda _: mm.convert(
        "rows.jsonl",
        "corpus/",
        reading="llava",  # type: ignore[arg-type]
    ),
    "tokenizer: str is not a fast tokenizer .*; pass what AutoTokenizer": lambda _: mm.TextDecoder(
        "gpt2"
    ),
    "device='gpu': give": lambda dataset: to_device(dataset, "gpu"),
    "dtype='bf16': give a floating type, such as torch.bfloat16": lambda dataset: to_device(
        dataset, "cpu", dtype="bf16"
    ),
    "dtype=torch.int8: give a floating type, such as torch.bfloat16": lambda dataset: to_device(
        dataset, "cpu", dtype=torch.int8
    ),
    "num_workers='2': give a whole number from 0 up": lambda dataset: mm.Loader(
        pipeline(dataset),
        num_workers="2",  # type: ignore[arg-type]
    ),
    "num_samples='2': give a whole number from 0 up": lambda dataset: pipeline(dataset).take("2"),  # type: ignore[arg-type]
    "rank='0': give a whole number from 0 up": lambda _: mm.World("0", 2),  # type: ignore[arg-type]
    "samples_per_shard='9': give a whole number from 1 up": lambda _: mm.convert(
        [],
        "corpus/",
        samples_per_shard="9",  # type: ignore[arg-type]
    ),
    "max_fraction='1%': give a number from 0 to 1": lambda _: mm.BadSamplePolicy(
        max_fraction="1%"  # type: ignore[arg-type]
    ),
    "global_batch_size=True: give a whole number from 1 up": lambda dataset: pipeline(
        dataset, global_batch_size=True
    ),
    "num_workers=True: give a whole number from 0 up": lambda dataset: mm.Loader(
        pipeline(dataset), num_workers=True
    ),
    r"grid=\(True, 1\): give \(P, Q\), two whole numbers from 1 up": lambda dataset: pipeline(
        dataset, grid=(True, 1)
    ),
    "global_batch_size=1000.*: is not below 2\\*\\*63; give a whole": lambda dataset: pipeline(
        dataset, global_batch_size=10**30
    ),
    "rows_per_rank='even': give 'balanced', or a list with": lambda dataset: mm.Loader(
        pipeline(dataset),
        rows_per_rank="even",  # type: ignore[arg-type]
    ),
    "plan=5: give the name of a plan, its folder or URL": lambda _: mm.Pack(
        64,
        plan=5,  # type: ignore[arg-type]
    ),
    r"'a': .*, -1\)}: give .*weight\)}, with weights from 0 up": lambda dataset: mm.Mixture(
        {"a": (dataset, -1)}, stop="all"
    ),
    "fill=0: give .red, green, blue., 0 to 255$": lambda _: mm.VideoDecoder(
        size=8,
        fill=0,  # type: ignore[arg-type]
    ),
    "device=5: give cpu, cuda or cuda:1": lambda dataset: mm.bake(
        pipeline(dataset),
        "baked/",
        device=5,  # type: ignore[arg-type]
    ),
    r"source=None: give a folder, a URL, or mm.open_dataset\(...\)": lambda _: mm.reshard(
        None,  # type: ignore[arg-type]
        "packs/",
        plan="p",
    ),
    r"b='val/': give mm.open_dataset\(...\)": lambda dataset: mm.find_leaks(
        dataset,
        "val/",  # type: ignore[arg-type]
    ),
    r"kinds='media': give a list, such as \['media', 'text'\]": lambda dataset: mm.find_duplicates(
        dataset, kinds="media"
    ),
    "counts=None: give a list of a whole number or an array": lambda _: mm.Order.from_counts(
        None,  # type: ignore[arg-type]
        global_batch_size=2,
    ),
    "allow_urls='s3://photos/': give a list of URL prefixes": lambda _: mm.convert(
        [], "corpus/", allow_urls="s3://photos/"
    ),
    "allow_urls=str: give a list of URL prefixes": lambda _: mm.convert(
        [], "corpus/", allow_urls="https://user:secret@photos/"
    ),
    "allow_urls=str: give a list of URL prefixes,": lambda _: mm.convert(
        [], "corpus/", allow_urls="s3://photos/" + 99 * "secret"
    ),
    "max_rejects='1%': give a fraction from 0.0 to 1.0, or a number of rows": lambda _: mm.convert(
        [],
        "corpus/",
        max_rejects="1%",  # type: ignore[arg-type]
    ),
    "max_rejects=-1: give a fraction from 0.0 to 1.0, or a number": lambda _: mm.finalize(
        "corpus/", max_rejects=-1
    ),
    "columns='image=photo': give {name: column}, such as": lambda _: mm.RowReading(
        columns="image=photo"  # type: ignore[arg-type]
    ),
    "splits: train=1.5 is not a fraction above 0": lambda _: mm.Splitting({"train": 1.5}),
    "0 means and 1 stds: give one mean and one std per channel": lambda _: mm.Normalize((), 0.5),
    "the name of the folder is empty; give a path or a URL": lambda _: mm.open_dataset(""),
    "splits={'train': True}: give {name: fraction}": lambda _: mm.Splitting({"train": True}),
    "splits={'val': '0.1'}: give {name: fraction}": lambda _: mm.Splitting(
        {"val": "0.1"}  # type: ignore[dict-item]
    ),
    "flip=True: give a probability, such as flip=0.5": lambda _: mm.ImageDecoder(
        size=32, flip=True
    ),
    'scale=.*: goes with crop="random" only': lambda _: mm.ImageDecoder(size=32, scale=(0.5, 1.0)),
    "collate=None: pass a function": lambda dataset: pipeline(dataset, collate=None),
    "shuffle='no': give True or False": lambda dataset: pipeline(dataset, shuffle="no"),
    r"Decode\(image=\): got .*: write image=mm.ImageDecoder\(size=224": lambda _: mm.Decode(
        image=mm.ImageDecoder  # type: ignore[arg-type]
    ),
    r"normalize=\(0.5, 0.5\): pass mm.Normalize": lambda dataset: to_device(
        dataset, "cpu", normalize=(0.5, 0.5)
    ),
    r"row='f': give a function": lambda _: mm.convert(
        [],
        "corpus/",
        row="f",  # type: ignore[arg-type]
    ),
    "sample_rng: the sample has no __lineage__": lambda _: mm.sample_rng({}),
    "sample=b.*a function by field draws from numpy.random": lambda _: mm.sample_rng(b"array"),
    "mark_delivered: the batch has no __lineage__": lambda dataset: mm.Loader(
        pipeline(dataset)
    ).mark_delivered({}),
    ": is a file, not a folder; name another": lambda dataset: mm.bake(
        pipeline(dataset, transforms=(dict,)), __file__
    ),
}
"""Part of the message -> a call."""


@pytest.mark.parametrize("message", CALLS)
def test_a_wrong_argument_is_one_line_that_says_what_to_write(message, dataset):
    with pytest.raises(mm.ConfigError, match=message) as caught:
        CALLS[message](dataset)
    assert "\n" not in str(caught.value)


def test_the_manifest_in_place_of_its_folder_is_named(dataset, tmp_path):
    manifest = Path(tmp_path, "mmstream.json")
    manifest.write_text("{}")
    with pytest.raises(mm.errors.ManifestError, match="of a dataset name the folder"):
        mm.open_dataset(manifest)


def test_python_can_suggest_the_name_that_was_meant():
    with pytest.raises(AttributeError) as caught:
        mm.ImageDecode  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("ImageDecode", mm)
