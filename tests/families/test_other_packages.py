"""Families of other packages: the worked example of the docs, installed, and packages that fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mmstream as mm
from mmstream.families import registry
from mmstream.families.family import check_count
from tests.helpers.corpora import write_corpus
from tests.helpers.paths import DOCS, ROOT
from tests.helpers.pictures import PNG

PAGE = (DOCS / "add-a-family.md").read_text("utf-8")

MODEL = """
import torch
from mmstream.families.family import import_torchvision

import_torchvision()
from transformers import CLIPImageProcessor, LlamaConfig, LlavaConfig
from transformers import LlavaForConditionalGeneration

from mmstream.train.tokenizer import byte_tokenizer

sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
sizes["num_attention_heads"] = 2
vision = {"model_type": "clip_vision_model", **sizes, "image_size": 56, "patch_size": 14}
tokenizer = byte_tokenizer(chat=True)
text = LlamaConfig(**sizes, vocab_size=len(tokenizer))


class ToyConfig(LlavaConfig):
    model_type = "toy_vl"


class ToyModel(LlavaForConditionalGeneration):
    config_class = ToyConfig


config = ToyConfig(
    text_config=text,
    vision_config=vision,
    image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    vision_feature_layer=-1,
)
model = ToyModel(config)
processor = CLIPImageProcessor(size={"height": 56, "width": 56}, do_center_crop=False)
"""

CHECK = """
from PIL import Image

picture = Image.open("picture.png")
whole = processor(picture, return_tensors="pt").pixel_values
halves = processor(picture, size={"height": 56, "width": 112}, return_tensors="pt").pixel_values
wanted = torch.cat([whole, *halves.split(56, dim=3)])
torch.testing.assert_close(batch["image"], wanted.repeat(4, 1, 1, 1))
assert int((batch["input_ids"] == config.image_token_id).sum()) == 4 * 3 * 16
assert torch.isfinite(loss)
loss.backward()
blank = mm.model_inputs({"input_ids": torch.ones(1, 4, dtype=torch.int64)}, model)
assert blank["pixel_values"].shape == (3, 3, 56, 56)
assert int((blank["input_ids"] == config.image_token_id).sum()) == 3 * 16
"""


def block(name: str) -> str:
    found = re.search(rf"<!-- file: {name} -->\n```python\n(.*?)```", PAGE, re.S)
    assert found is not None
    return found.group(1)


def install(site: Path, name: str, module: str, entry: str, version: str = "1.2") -> None:
    """Write a distribution into a folder of packages, as pip does."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[mmstream.families]\n{entry}\n")
    (site / f"{name}.py").write_text(module)


def run(folder: Path, site: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = f"{site}{os.pathsep}{ROOT}"
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.slow
def test_the_worked_example_of_the_docs_trains(tmp_path: Path) -> None:
    project = tomllib.loads(re.findall(r"```text\n(\[project\].*?)```", PAGE, re.S)[0])
    assert project["tool"]["setuptools"]["py-modules"] == ["toy_vl"]
    (entry,) = project["project"]["entry-points"]["mmstream.families"].items()
    install(tmp_path / "site", "toy_vl", block("toy_vl.py"), " = ".join(entry))
    messages = [
        {"role": "user", "content": [{"type": "image", "field": "png"}]},
        {"role": "assistant", "content": "A cat."},
    ]
    files = {"png": PNG, "json": json.dumps({"messages": messages}).encode()}
    (tmp_path / "picture.png").write_bytes(PNG)
    write_corpus(tmp_path / "chats", [8], lambda _: files)
    (tmp_path / "script.py").write_text(
        "if __name__ == '__main__':\n    exec(open('all.py').read(), globals())\n"
    )
    (tmp_path / "all.py").write_text(MODEL + block("use.py") + CHECK)
    done = run(tmp_path, tmp_path / "site", "script.py")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty folder of packages. Families are looked up again, before and after."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    for cache in (registry.family_of_type, registry._entry_points):
        cache.cache_clear()
    yield folder
    for cache in (registry.family_of_type, registry._entry_points):
        cache.cache_clear()


WORKS = "from mmstream.families import Family\nFAMILY = Family()\n"
LACKS = "from mmstream.families import Family\nFAMILY = Family(takes=('image',))\n"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("1 / 0", r"a_type of toy_a 1\.2 cannot be imported: ZeroDivisionError: division by zero"),
        ("", r"a_type of toy_a 1\.2 cannot be imported: AttributeError: .*FAMILY"),
        ("FAMILY = 3", r"a_type of toy_a 1\.2 is a int: toy_a:FAMILY must be an instance of"),
        (LACKS, r"a_type of toy_a 1\.2 takes image, and has no image_inputs\(\)"),
    ],
)
def test_a_package_that_does_not_work_is_an_error_with_its_version(
    site: Path, module: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "toy_a", raising=False)
    install(site, "toy_a", module, "a_type = toy_a:FAMILY")
    with pytest.raises(mm.ConfigError, match=message) as raised:
        mm.families.of("a_type")
    assert "\n" not in str(raised.value)


def test_only_the_family_that_is_asked_for_is_imported(site: Path) -> None:
    install(site, "toy_b", WORKS, "b_type = toy_b:FAMILY")
    install(site, "toy_c", "1 / 0", "c_type = toy_c:FAMILY")
    assert mm.families.of("b_type") == mm.families.Family()
    assert "toy_c" not in sys.modules


def test_a_package_is_found_in_the_folder_where_it_is_developed(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (site, tmp_path / "project"):
        install(folder, "toy_h", WORKS, "h_type = toy_h:FAMILY")
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    monkeypatch.chdir(tmp_path / "project")
    assert mm.families.of("h_type") == mm.families.Family()


def test_families_of_mmstream_come_first(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(site, "toy_d", "1 / 0", "qwen2_vl = toy_d:FAMILY")
    assert mm.families.of("qwen2_vl").takes == ("image", "video")
    assert "toy_d 1.2 adds qwen2_vl" in caplog.text
    assert "toy_d" not in sys.modules


def test_the_version_of_a_package_is_known_by_its_functions(site: Path) -> None:
    install(site, "toy_e", "def length(shape):\n    return 1\n", "e_type = toy_e:FAMILY")
    from importlib import import_module

    length = import_module("toy_e").length
    assert registry.versions_of(length, None, mm.families.qwen_vl.image_length()) == {
        "toy_e": "1.2"
    }


def test_what_a_family_of_another_package_raises_names_the_package(site: Path) -> None:
    module = """
from dataclasses import dataclass
from types import SimpleNamespace
from mmstream.families import Family

@dataclass(frozen=True)
class Fails(Family):
    def inputs(self, media, ids, config):
        raise KeyError("patch")

FAMILY = Fails()
CONFIG = SimpleNamespace(model_type="g_type")
"""
    install(site, "toy_g", module, "g_type = toy_g:FAMILY")
    from importlib import import_module

    config = import_module("toy_g").CONFIG
    message = r"g_type of toy_g 1\.2 has failed: KeyError: 'patch'"
    with pytest.raises(mm.ConfigError, match=message):
        mm.model_inputs({"input_ids": torch.ones(1, 2, dtype=torch.int64)}, config)


def test_other_tiles_need_a_count_of_their_own() -> None:
    @dataclass(frozen=True)
    class QuadVL(mm.families.llava.Llava):
        """Has tiles, and counts as Llava does."""

    message = r"a_type takes 2 image tokens .* override QuadVL\.num_tokens, which it inherits, or "
    config = SimpleNamespace(model_type="a_type", image_token_id=1)
    count = mm.families.TokenCount(2, "2")
    with pytest.raises(mm.ConfigError, match=message):
        check_count(torch.ones(1, 1, dtype=torch.int64), config, "image", count, QuadVL())


def test_decoders_take_a_processor_or_what_holds_it() -> None:
    class LlavaImageProcessor:
        do_resize, resample, size = True, 3, {"shortest_edge": 56}

    family = mm.families.of("llava")
    decoders = family.decoders(LlavaImageProcessor())
    assert decoders == family.decoders(SimpleNamespace(image_processor=LlavaImageProcessor()))
    assert decoders["image"].interpolation == "bicubic"
    with pytest.raises(mm.ConfigError, match=r"has no image_processor: pass .*AutoProcessor"):
        family.decoders(SimpleNamespace())
    LlavaImageProcessor.do_center_crop = True
    LlavaImageProcessor.crop_size = {"height": 56, "width": 56}
    tiles = {"size": 56, "tiles": mm.families.TileRule()}
    with pytest.raises(mm.ConfigError, match=r"resize_size=56: .* from the processor: .*crop_r"):
        family.decoders(LlavaImageProcessor(), image=tiles)


def test_aliases_are_the_same_family() -> None:
    of = mm.families.of
    for alias in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
        assert of(alias) is of("qwen3_vl")
    with pytest.raises(mm.ConfigError, match="'minicpmv4_6' is not one of"):
        of("minicpmv4_6")  # its processor is another one
