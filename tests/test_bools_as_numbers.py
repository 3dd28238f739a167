"""True and False are no numbers: Python would take them as 1 and 0 without a word."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer
from mmstream.wrong_arguments import refuse_bools, require_numbers
from tests.helpers.corpora import write_corpus


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    folder = tmp_path_factory.mktemp("bools")
    write_corpus(folder, [4])
    return mm.open_dataset(folder)


def pipeline(dataset: mm.Dataset, **settings: Any) -> mm.Pipeline:
    return mm.Pipeline(dataset, **{"global_batch_size": 2, **settings})


CALLS: dict[str, Callable[..., Any]] = {
    "AudioDecoder": lambda _, **k: mm.AudioDecoder(**k),
    "BadSamplePolicy": lambda _, **k: mm.BadSamplePolicy(**k),
    "Cost": lambda _, **k: mm.Cost(**k),
    "Decode": lambda _, **k: mm.Decode(**k),
    "DownloadOptions": lambda _, **k: mm.DownloadOptions(**k),
    "Flat": lambda _, **k: mm.Flat(**k),
    "ImageDecoder": lambda _, **k: mm.ImageDecoder(**k),
    "InternVLTiles": lambda _, **k: mm.InternVLTiles(**k),
    "LlavaNextTiles": lambda _, **k: mm.LlavaNextTiles(**k),
    "LlavaOnevisionTiles": lambda _, **k: mm.LlavaOnevisionTiles(**k),
    "Loader": lambda dataset, **k: mm.Loader(pipeline(dataset), **k),
    "MediaOptions": lambda _, **k: mm.MediaOptions(**k),
    "VideoDecoder": lambda _, **k: mm.VideoDecoder(**k),
    "Mixture": lambda dataset, **k: mm.Mixture({"a": (dataset, 1)}, **k),
    "Normalize": lambda _, **k: mm.Normalize(**{"mean": 0.5, "std": 0.5, **k}),
    "Order.from_counts": lambda _, **k: mm.Order.from_counts([4], **{"global_batch_size": 2, **k}),
    "Pack": lambda _, **k: mm.Pack(**{"max_tokens": 8, **k}),
    "PackLimits": lambda _, **k: mm.PackLimits(**{"max_tokens": 8, **k}),
    "Pipeline": pipeline,
    "Pipeline.as_webdataset": lambda dataset, **k: pipeline(dataset).as_webdataset(**k),
    "Pipeline.take": lambda dataset, **k: pipeline(dataset).take(**k),
    "QwenVLPositions": lambda _, **k: mm.QwenVLPositions(
        **{"image_token_id": 1, "video_token_id": 2, "patch_size": 14, **k}
    ),
    "RowReading": lambda _, **k: mm.RowReading(**k),
    "Splitting": lambda _, **k: mm.Splitting(**k),
    "TextDecoder": lambda _, **k: mm.TextDecoder(byte_tokenizer(), **k),
    "WhisperFeatures": lambda _, **k: mm.WhisperFeatures(**k),
    "World": lambda _, **k: mm.World(**{"world_size": 2, **k}),
    "bake": lambda dataset, **k: mm.bake(pipeline(dataset), "baked", **k),
    "bench": lambda dataset, **k: mm.bench(pipeline(dataset), **k),
    "collate": lambda _, **k: mm.collate([{"input_ids": np.array([1])}], **k),
    "convert": lambda _, **k: mm.convert("rows.jsonl", "corpus", **k),
    "finalize": lambda _, **k: mm.finalize("corpus", **k),
    "find_duplicates": lambda dataset, **k: mm.find_duplicates(dataset, **k),
    "find_leaks": lambda dataset, **k: mm.find_leaks(dataset, dataset, **k),
    "internvl_length": lambda _, **k: mm.internvl_length(**k),
    "llava_next_length": lambda _, **k: mm.llava_next_length(**k),
    "llava_onevision_length": lambda _, **k: mm.llava_onevision_length(**k),
    "llava_onevision_video_length": lambda _, **k: mm.llava_onevision_video_length(**k),
    "measure": lambda dataset, **k: mm.measure(
        dataset, decode=mm.Decode(text=mm.TextDecoder(byte_tokenizer())), **k
    ),
    "plan_packs": lambda dataset, **k: mm.plan_packs(dataset, **{"max_tokens": 8, **k}),
    "qwen3_omni_video_length": lambda _, **k: mm.qwen3_omni_video_length(**k),
    "qwen3_vl_video_length": lambda _, **k: mm.qwen3_vl_video_length(**k),
    "qwen_omni_video_length": lambda _, **k: mm.qwen_omni_video_length(**k),
    "qwen_vl_length": lambda _, **k: mm.qwen_vl_length(**k),
    "qwen_vl_video_length": lambda _, **k: mm.qwen_vl_video_length(**k),
    "smolvlm_video_length": lambda _, **k: mm.smolvlm_video_length(**k),
    "reshard": lambda dataset, **k: mm.reshard(dataset, "packs", plan="p", **k),
    "show": lambda dataset, **k: mm.show(dataset[0], **k),
    "split_rows": lambda _, **k: mm.split_rows({"__valid__": np.ones(2, bool)}, **k),
    "statistics": lambda dataset, **k: mm.statistics(dataset, **k),
}
"""How each public name with settings that are numbers is called, by its name."""

NOT_MADE_BY_USERS = {
    "AudioShape",
    "BakeReport",
    "ConvertReport",
    "ImageShape",
    "LazyBytes",
    "Order",
    "Statistics",
    "VideoShape",
}


def numeric_settings(name: str) -> list[str]:
    """List the settings of a public name that are numbers or tuples of numbers, by their types."""
    try:
        parameters = inspect.signature(attrgetter(name)(mm)).parameters.values()
    except ValueError:
        return []  # an exception, which Python itself makes
    types = {parameter.name: str(parameter.annotation) for parameter in parameters}
    others = re.compile("Sequence|Mapping|Iterable|Callable|NDArray")
    return [
        setting
        for setting, text in types.items()
        if re.search(r"\b(int|float)\b", text) and (name == "Normalize" or not others.search(text))
    ]


def test_all_public_names_with_numeric_settings_are_tried() -> None:
    names = {name for name in mm.__all__ if callable(getattr(mm, name)) and numeric_settings(name)}
    assert names - NOT_MADE_BY_USERS <= CALLS.keys()


SETTINGS = [(name, setting) for name in CALLS for setting in numeric_settings(name)]


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
@pytest.mark.parametrize("value", [True, False])
def test_a_bool_is_no_number(dataset: mm.Dataset, name: str, setting: str, value: bool) -> None:
    with pytest.raises(mm.ConfigError, match=rf"{setting}.*{value}"):
        CALLS[name](dataset, **{setting: value})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ImageDecoder", {"size": 32, "crop": "random", "scale": (0.5, True)}),
        ("ImageDecoder", {"size": (32, True)}),
        ("LlavaNextTiles", {"shapes": ((336, True),)}),
        ("LlavaOnevisionTiles", {"background": (0, 0, True)}),
        ("Loader", {"rows_per_rank": [True, 1], "world": mm.World(0, 2)}),
        ("Pipeline", {"grid": (True, 1)}),
        ("Splitting", {"splits": {"train": True}}),
    ],
)
def test_a_bool_among_numbers_is_refused(
    dataset: mm.Dataset, name: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(mm.ConfigError, match="True"):
        CALLS[name](dataset, **settings)


@pytest.mark.parametrize("setting", [{"scale": (0.5, 1.0)}, {"ratio": (1.0, 1.0)}])
def test_the_area_of_a_random_crop_needs_a_random_crop(setting: dict[str, Any]) -> None:
    with pytest.raises(mm.ConfigError, match='goes with crop="random" only'):
        mm.ImageDecoder(size=32, **setting)
    mm.ImageDecoder(size=32, crop="random", **setting)


def test_flip_says_to_give_a_probability() -> None:
    with pytest.raises(mm.ConfigError, match=r"flip=True: give a probability, such as flip=0\.5"):
        mm.ImageDecoder(size=32, flip=True)


@pytest.mark.parametrize("value", [True, np.True_, (1, True), [[False]], {"a": True}])
def test_bools_are_seen_in_tuples_and_mappings_and_as_numpy_has_them(value: Any) -> None:
    with pytest.raises(mm.ConfigError, match=r"^side=.*: give a number, not True or False$"):
        refuse_bools(side=value)


@pytest.mark.parametrize("value", [1, 0, 0.5, None, "text", (1, 2), np.int64(1)])
def test_what_is_no_bool_is_left_to_other_checks(value: Any) -> None:
    refuse_bools(side=value)


@pytest.mark.parametrize("value", ["8", (1, "8"), [["8"]], {"a": "8"}])
def test_text_is_seen_in_lists_and_mappings(value: Any) -> None:
    with pytest.raises(mm.ConfigError, match=r"^side=.*'8'.*: give a number, not text$"):
        require_numbers(side=value)


def test_a_fraction_of_a_split_that_is_text_is_refused() -> None:
    message = r"^splits=\{'val': '0\.1'\}: give a number, not text$"
    with pytest.raises(mm.ConfigError, match=message):
        mm.Splitting({"val": "0.1"})  # type: ignore[dict-item]
