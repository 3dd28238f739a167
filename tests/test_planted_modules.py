"""No module that lies in the current folder runs in a helper process, unless the user asked for it.

A downloaded dataset is a folder of files by strangers, and people work in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mmstream
from tests.helpers.corpora import write_corpus

SECONDS = 500
"""A time limit against a hang."""

PRELOADED = 50_000
"""Objects of torch alone are more than this; those of mmstream's own modules are fewer."""

NAMES = ["msgspec", "PIL", "selectors", "socket", "numpy", "torch", "mmstream/__init__"]

SCRIPT = """
import gc, os, sys
import mmstream as mm


def look(sample):
    sample["path"] = [path or os.getcwd() for path in sys.path]
    sample["environment"] = {name: os.environ.get(name) for name in NAMES}
    sample["num_preloaded"] = gc.get_freeze_count()  # frozen in the server, before the fork
    return sample


NAMES = ("PYTHONSAFEPATH", "PYTHONPATH", "MMSTREAM_FROM_PARENT", "MMSTREAM_MAIN_PROCESS")

if __name__ == "__main__":
    import json
    pipeline = mm.Pipeline(mm.open_dataset(sys.argv[1]), global_batch_size=2, transforms=(look,))
    before = dict(os.environ)
    for context in sys.argv[2:]:
        loader = mm.Loader(pipeline, num_workers=1, multiprocessing_context=context)
        batch = next(iter(loader))
        assert dict(os.environ) == before
        here = look({})
        seen = {name: batch[name][0] for name in ("path", "environment")}
        num_preloaded = int(batch["num_preloaded"][0])
        print(json.dumps([seen, {name: here[name] for name in seen}, num_preloaded]))
        loader.close()
"""


@pytest.fixture
def planted(tmp_path):
    """A folder of data with modules of a stranger in it; each leaves a file when it runs."""
    folder = tmp_path / "downloaded"
    write_corpus(folder, [8])
    for name in NAMES:
        module = folder / f"{name}.py"
        module.parent.mkdir(exist_ok=True)
        module.write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    return folder


def run(folder: Path, *command: str, **environment: str) -> str:
    root = str(Path(mmstream.__file__).parents[1])
    given = {name: text for name, text in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=given | {"PYTHONPATH": root} | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def script(tmp_path: Path) -> str:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    return str(folder / "script.py")


@pytest.mark.slow
def test_workers_of_a_script_run_no_module_of_the_current_folder(tmp_path, planted):
    contexts = ["forkserver", "spawn"]
    lines = run(planted, script(tmp_path), str(planted), *contexts).splitlines()
    assert not (tmp_path / "ran").exists()
    for context, line in zip(contexts, lines, strict=True):
        in_worker, in_parent, num_preloaded = json.loads(line)
        assert in_worker == in_parent
        assert (num_preloaded > PRELOADED) == (context == "forkserver")


@pytest.mark.slow
def test_the_server_preloads_where_mmstream_is_found_through_the_current_folder(tmp_path):
    """As a program that is run as a module in the root of a clone."""
    root = Path(mmstream.__file__).parents[1]
    (tmp_path / "program.py").write_text(SCRIPT)
    (tmp_path / "mmstream").symlink_to(root / "mmstream")
    write_corpus(tmp_path / "data", [8])
    text = run(tmp_path, "-m", "program", str(tmp_path / "data"), "forkserver", PYTHONPATH="")
    in_worker, in_parent, num_preloaded = json.loads(text)
    assert in_worker == in_parent
    assert num_preloaded > PRELOADED


def test_a_model_type_finds_no_package_of_the_current_folder(tmp_path, planted):
    """As in a notebook, where the current folder is on Python's path."""
    for suffix in ("dist-info", "egg-info"):
        info = planted / f"stranger-1.0.{suffix}"
        info.mkdir()
        (info / "entry_points.txt").write_text("[mmstream.families]\nstranger = stranger:FAMILY\n")
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (planted / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('stranger')")
    for name in NAMES:  # which the import of mmstream would run, as the user has asked for them
        (planted / f"{name}.py").unlink()
    text = run(
        planted,
        "-c",
        "from mmstream.families.registry import family_of_type\n"
        "print(family_of_type('stranger'), family_of_type('qwen2_vl').takes)",
    )
    assert text == "None ('image', 'video')\n"
    assert not (tmp_path / "ran").exists()


def test_commands_run_no_module_of_the_current_folder(tmp_path, planted):
    command = str(tmp_path / "mmstream_command.py")  # as pip writes it
    Path(command).write_text(
        "from mmstream.cli import main\nif __name__ == '__main__':\n    main()\n"
    )
    rows = planted / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "row {n}"}}\n' for n in range(8)))
    options = ("--format", "text", "--samples-per-shard", "4", "--num-workers", "2")
    run(planted, command, "convert", str(rows), "converted", *options)
    assert not (tmp_path / "ran").exists()
