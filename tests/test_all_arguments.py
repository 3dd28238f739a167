"""Every public class and function, with wrong values for each of its arguments: named errors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

import mmstream as mm
from mmstream.audit import check_functions
from mmstream.integrations import (
    LoaderTrainer,
    flash_attention_arguments,
    flex_block_mask,
    megatron_packing,
    model_inputs,
    preference_inputs,
    torchtitan_batch,
)
from mmstream.train import TrainConfig
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
        mm.Cost.fitted: {"sums": [[n, n * n, 0, 0] for n in range(9)], "seconds": [*range(9)]},
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
        mm.QwenVLPositions: {"image_token_id": 1, "video_token_id": 2, "patch_size": 14},
        mm.Splitting: {"splits": {"a": 1.0}},
        mm.TextDecoder: {"tokenizer": tokenizer},
        mm.Times: {"source": "json.times", "follows": "video"},
        mm.VideoDecoder: {"size": 8},
        mm.bake: {"pipeline": pipeline, "dest": "baked", **quiet},
        mm.check_packing: {"model": None, "batch": batch},
        mm.collate: {"samples": [{"txt": b"a"}]},
        mm.convert: {"rows": [{"text": "a"}], "dest": "converted", **quiet},
        mm.finalize: {"dest": f"{folder}/rows"},
        mm.find_duplicates: {"dataset": dataset, **quiet},
        mm.find_leaks: {"a": dataset, "b": dataset, **quiet},
        mm.one_segment: {"sample": dataset[0]},
        mm.open_dataset: {"source": folder},
        mm.open_mixture: {"path": str(mixture)},
        mm.plan: {"pipeline": pipeline, "limits": 64, **quiet},
        mm.reshard: {"source": folder, "dest": "packs", "plan": "p", **quiet},
        mm.sample_rng: {"sample": dataset[0]},
        mm.show: {"value": dataset},
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
        dataset.ref_of_key: {},
        mm.show(dataset[0]).save: {"path": "page.html"},
        flash_attention_arguments: {"batch": flat_batch},
        flex_block_mask: {"batch": flat_batch},
        megatron_packing: {"batch": flat_batch},
        model_inputs: {"batch": batch, "model_or_family": "llama"},
        preference_inputs: {"batch": flat_batch, "pad_token_id": 0},
        torchtitan_batch: {"batch": flat_batch},
        check_functions: {"pipeline": pipeline},
    }
    others = [getattr(mm, name) for name in mm.__all__ if name not in MADE_BY_MMSTREAM]
    errors = [each for each in others if inspect.isclass(each) and issubclass(each, Exception)]
    makers = [
        getattr(each, name)
        for each in filter(inspect.isclass, others)
        for name, value in vars(each).items()
        if isinstance(value, classmethod)
    ]
    return {each: {} for each in (*others, *makers) if each not in errors} | special


MADE_BY_MMSTREAM = {
    *("AudioShape", "BakeReport", "ConvertReport", "Dataset", "ImageShape", "LazyBytes"),
    *("MediaShapes", "MediaText", "Order", "Statistics", "VideoShape"),
}
"""Users read these and do not make them."""


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
