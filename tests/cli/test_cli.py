"""The command line: output, exit codes, and one-line messages for mistakes."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mmstream.cli import COMMANDS, cli
from mmstream.cli.shared import in_options
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME, Manifest
from mmstream.dataset.open import open_dataset
from mmstream.storage import open_store
from mmstream.train import TrainConfig
from tests.helpers.convert_corpus import make_corpus, write_rows
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.foreign_tars import FOREIGN, make_tar
from tests.helpers.media_files import audio_file, video_file
from tests.helpers.paths import ROOT


@pytest.fixture
def rows(tmp_path):
    """Forty rows, two of them rejects."""
    return make_corpus(tmp_path)


# -- help ---------------------------------------------------------------------------------------


def test_train_has_an_option_for_every_setting_and_shows_its_default(mmstream):
    settings = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    params = {param.name: param for param in cli.commands["train"].params}
    assert params.keys() == settings.keys() | {"pipeline_name"}
    assert {name: params[name].default for name in settings if name not in ("url", "out")} == {
        name: default for name, default in settings.items() if name not in ("url", "out")
    }
    shown = re.sub(r"\s+", " ", mmstream("train", "--help")[1])
    for text in ("--log-every INTEGER", "--lr FLOAT", "--model TEXT"):
        name = text.split()[0].removeprefix("--").replace("-", "_")
        assert re.search(rf"{text} [^\[]*\[default: {settings[name]}\]", shown)
    assert "None" not in shown


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_help_starts_with_a_command_to_copy(mmstream, name):
    code, out, err = mmstream(name, "--help")
    usage, blank, example, after, *_ = out.splitlines()
    assert (code, err) == (0, "")
    assert usage.startswith(f"Usage: mmstream {name} ")
    assert (blank, after) == ("", "")
    words = example.split()
    assert f"mmstream {name} " in example
    given = {word for word in words[words.index(name) :] if word.startswith("--")}
    assert given <= {option for param in cli.commands[name].params for option in param.opts}
    assert out.splitlines()[4].strip() in COMMANDS.data[name][1]


def test_the_list_of_commands_imports_none_of_them():
    program = "import sys; from mmstream.cli import cli; cli(['--help'], standalone_mode=False)"
    program += "; assert 'mmstream.cli.info' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^  ([a-z]+)  ", done.stdout.partition("Commands:")[2], re.M) == sorted(
        cli.commands
    )


# -- messages of the library, in the words of a command -----------------------------------------


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("replace it with overwrite=True", "replace it with --overwrite"),
        ("or pass rerun=mm.Rerun(overwrite=True) (it", "or pass --overwrite (it"),
        ("media_root=media: no such folder", "--media-root media: no such folder"),
        ('x. Loader(on_change="finish_epoch") ends', "x. --on-change finish_epoch ends"),
        ("format='x': must be one of", "--format x: must be one of"),
        ("(model=, out=), or", "(--model, --out), or"),
        ("train: epochs is 0", "--epochs is 0"),
        ("train: on_change is 0", "--on-change is 0"),
        ("model: x is not clip", "--model: x is not clip"),
        ("bad (max_fraction=0.01)", "bad (--max-bad-fraction 0.01)"),
        ("a media_root that", "a --media-root that"),
        ("/data/media_root/model=3/on_change.py", "/data/media_root/model=3/on_change.py"),
        ("an epoch of the model", "an epoch of the model"),
        ("model 'x' has no samples", "model 'x' has no samples"),
        ("drop_last=False", "drop_last=False"),
        ("epochs=0: give 1 or None", "--epochs 0: give 1"),
    ],
)
def test_a_message_names_options_and_no_arguments(message, expected):
    names = ("overwrite", "media_root", "on_change", "format", "model", "out", "epochs")
    options = {name: f"--{name.replace('_', '-')}" for name in names}
    assert in_options(message, options | {"max_fraction": "--max-bad-fraction"}) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "convert {rows} {tmp}/out --media-root {tmp}/none",
            "usage: --media-root {tmp}/none: no s",
        ),
        (
            "convert {rows} {tmp}/out --split-by speaker",
            "--split-by would do nothing here: it goes with --split",
        ),
        ("convert {rows} {tmp}/out --split-by-media", "--split-by-media would do nothing here"),
        ("convert {rows} {tmp}/out --map image=a,image=b", "write NAME=COLUMN, each NAME once"),
        ("convert {rows} {tmp}/out --split a=1,a=1", "write NAME=FRACTION,NAME=FRACTION, each NAM"),
        ("convert {rows} {tmp}/out --format json", "usage: --format json: must be one of captions"),
        (
            "convert {rows} {tmp}/tars",
            "name an empty destination, or pass --overwrite (it replaces sha",
        ),
        (
            "train {tmp}/tars --out {tmp}/run --epochs 0",
            "usage: --epochs 0: give a whole number from 1 up\n",
        ),
        (
            "train {tmp}/tars --out {tmp}/run --model nope",
            "usage: --model: nope is not clip, vlm or",
        ),
        ("info {rows}", "rows.jsonl: a file that is not a tar; `mmstream convert` makes shards"),
        ("verify {tmp}/tars/*.tar", "no such tar; write a range in braces, or name the folder"),
        ("verify {tmp}/tars --source a", "--source names the source of --quarantine"),
        ("verify {tmp}/tars --decode --quarantine q.jsonl", "add --write-bad"),
        ("index {tmp}/none", "/none: no tars to index; name the folder of plain ones"),
        (
            "bake source dest --pipeline a:b --device cuda",
            "--device would do nothing here: it goes with --batch-function",
        ),
        (
            "bake source dest --pipeline a:b --batch-size 8",
            "--batch-size would do nothing here: it goes with --batch-function",
        ),
        ("finalize {tmp}/absent --max-rejects nan%", "usage: --max-rejects nan"),
        ("info oss://bucket/x", "usage: oss:// needs another package: Install ossfs"),
        (
            "convert {tmp}/utf16.jsonl {tmp}/out",
            "is not UTF-8; say --encoding utf-16",
        ),
        ("demo --out {rows}", "error: {rows}: File exists\n"),
        (
            "train {tmp}/tars --out {rows}",
            "usage: train: {rows} is a file; name a folder with --out\n",
        ),
        (
            "train {tmp}/tars --out {tmp}/run --pipeline a:b --global-batch-size 8",
            "--global-batch-size would do nothing here: it goes without --pipeline",
        ),
        (
            "info {tmp}/mix.json/",
            "a file that is not a tar; `mmstream convert` makes shards of rows; of a dataset name",
        ),
    ],
)
def test_a_mistake_is_reported_in_options(mmstream, rows, tmp_path, words, expected):
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars" / "a.tar").write_bytes(make_tar([("a.txt", b"")]))
    (tmp_path / "mix.json").write_text("{}")
    (tmp_path / "utf16.jsonl").write_text('{"text": "a"}', encoding="utf-16")
    names = {"rows": rows, "tmp": tmp_path}
    code, out, err = mmstream(*words.format(**names).split())
    assert (code in (1, 2), out) == (True, "")
    assert err.count("\n") == 1 or err.startswith("Usage: ")
    assert expected.format(**names) in err


# -- happy paths --------------------------------------------------------------------------------


def test_convert_info_verify(printed, rows, tmp_path):
    dest = tmp_path / "out"
    options = ["--samples-per-shard", 8, "--num-workers", 1, "--max-rejects", "10%"]
    out = printed("convert", rows, f"{dest}/", "--media-root", tmp_path, *options)
    assert out.startswith("40 rows -> 38 samples in 5 shards, 2 rejected; ")
    assert (
        f"all rejected rows are in {dest}/rejects.jsonl. The reasons, with one example each:\n"
        in out
    )
    assert "\n  1 row: row 7: " in out

    out = printed("info", dest)
    assert "38 samples, 5 shards" in out
    assert "\n  samples per shard: 7 to 8\n" in out
    assert "\n  .jpg: 38\n" in out
    assert "\n  some keys: " in out

    assert printed("verify", dest) == "ok: 38 samples in 5 shards\n"
    decoded = "decoded: jpg (38 samples), json (38 samples); not decoded: txt (38 samples): "
    assert printed("verify", dest, "--decode") == (
        f"{decoded}nothing here decodes them\nok: 38 samples in 5 shards\n"
    )


@pytest.mark.slow
def test_a_retry_of_rejected_rows_says_what_it_gained(mmstream, rows, tmp_path):
    words = ("convert", rows, tmp_path / "out", "--samples-per-shard", "10")
    assert mmstream(*words, "--max-rejects", "2")[0] == 0
    (rows.parent / "images" / "absent.jpg").write_bytes(jpeg(1))
    text = mmstream(*words, "--retry-rejects", "--max-rejects", "2")[1]
    assert "1 of 2 rejected rows became samples" in text
    write_rows(rows, [{"text": "all is well"}])
    mmstream("convert", rows, tmp_path / "well")
    text = mmstream("convert", rows, tmp_path / "well", "--retry-rejects")[1]
    assert "nothing to retry: no row was rejected" in text


def test_info_as_json(printed, corpus):
    about = json.loads(printed("info", corpus, "--json", "--keys", 2))
    expected = {
        "num_samples": 97,
        "num_shards": 5,
        "keys": ["000024", "000072"],  # spread over all
        "url": corpus,
        "num_bytes": sum(path.stat().st_size for path in Path(corpus).glob("*.tar")),
    }
    assert about | expected == about
    assert set(about["fields"]) == {"jpg", "txt", "json"}
    assert json.loads(printed("info", corpus, "--json", "--keys", 0))["keys"] == []


def test_info_shows_what_a_manifest_says_of_its_source_as_json(mmstream, tmp_path):
    folder = write_corpus(tmp_path, [2])
    store = open_store(folder)
    source = {"by": "hand\n\u2028", "bake": {"version": 1}}
    manifest = dataclasses.replace(Manifest.read(store), source=source)
    store.write(MANIFEST_NAME, manifest.to_bytes())
    lines = mmstream("info", folder)[1].split("  keys: 000000, 000001\n")[1]
    assert json.loads(f"{{{lines}}}") == source
    assert len(lines.splitlines()) == len(json.dumps(source, indent=2).split("\n")) - 2


def test_an_index_beside_its_tars_asks_for_no_option_to_open_it(mmstream, tmp_path):
    folder = tmp_path / "tars"
    folder.mkdir()
    write_corpus(tmp_path, [2])
    for tar in tmp_path.rglob("*.tar"):
        tar.rename(folder / tar.name)
    out = mmstream("index", folder, "--output", f"{folder}/")[1]
    assert out == "1 tar, 2 samples; 1 tar indexed\n"
    assert mmstream("info", folder)[0] == 0
    elsewhere = mmstream("index", folder, "--output", tmp_path / "elsewhere")[1]
    assert "use --allow-foreign-urls" in elsewhere


def test_splits(mmstream, printed, rows, tmp_path):
    split = ["--split", "train=0.5,val=0.5", "--max-rejects", "10%"]
    out = printed("convert", rows, tmp_path / "out", *split)
    counts = {
        name: json.loads(printed("info", tmp_path / "out" / name, "--json"))["num_samples"]
        for name in ("train", "val")
    }
    assert sum(counts.values()) == 38
    for name, count in counts.items():
        assert f" -> {count} samples in 1 shard" in out.partition(f"\n  {name}: ")[2]
    error = mmstream("leakcheck", tmp_path / "out", tmp_path / "out/val")[2]
    assert "name the folder of one dataset, such as a split of a conversion" in error


# -- mistakes and damage ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "",
        "no-such-command",
        "convert",
        "convert {rows}",
        "convert {rows} {out} --no-such-option",
        "convert {rows} {out} --samples-per-shard 0",
        "convert {rows} {out} --samples-per-shard many",
        "convert {rows} {out} --num-workers -1",
        "convert {rows} {out} --captions some",
        "convert {rows} {out} --format no-such-format",
        "convert {rows} {out} --split train",
        "convert {rows} {out} --split train=x",
        "convert {rows} {out} --split train=nan",
        "convert {rows} {out} --split train=0.9,train=1",
        "convert {rows} {out} --max-rejects nan%",
        "convert {rows} {out} --max-rejects=-1",
        "convert {rows} {out} --split train=0.5",
        "convert {rows} {out} --split train=2,val=-1",
        "convert {rows} {out} --split a/../b=1",
        "convert {empty} {out}",
        "index",
        "index {empty}",
        "index {absent}",
        "index {tars} --num-threads 0",
        "info {tars} --keys -1",
        "info s3://",
        "train {tars}",
        "train {tars} --out {out} --epochs -1",
    ],
)
def test_a_users_mistake_has_exit_code_2(mmstream, rows, tmp_path, line):
    (tmp_path / "empty").mkdir()
    write_rows(tmp_path / "empty.jsonl", [])
    names = {
        "rows": rows,
        "out": tmp_path / "out",
        "tars": FOREIGN,
        "absent": tmp_path / "absent",
        "empty": tmp_path / ("empty.jsonl" if line.startswith("convert") else "empty"),
    }
    code, out, err = mmstream(*line.format(**names).split())
    assert (code, out) == (2, "")
    assert err.startswith(("Usage: ", "usage: "))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("convert {tmp}/absent.jsonl {tmp}/out", "absent.jsonl"),
        ("info {tmp}/absent", "no such folder"),
        ("info {tmp}/absent.tar", "no such tar"),
        ("verify {tmp}/absent", "no such folder"),
        ("info {tmp}/unfinished", "mmstream convert` again"),
        ("verify {tmp}/unfinished", "mmstream convert` again"),
        ("info {tmp}/broken", "mmstream.json"),
        ("info {tmp}/page.tar", "not a tar"),
        ("index {tmp}/pages", "not a tar"),
        ("info {foreign}/sample.tgz", "`mmstream convert` writes a plain one"),
    ],
)
def test_a_problem_of_the_data_has_exit_code_1_and_a_line(mmstream, tmp_path, line, reason):
    for name, file, text in [
        ("unfinished", MARKER_NAME, "{}"),
        ("broken", MANIFEST_NAME, "{"),
        ("pages", "a.tar", "<html>" * 100),
        (".", "page.tar", "<html>" * 100),
    ]:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / file).write_text(text)
    code, out, err = mmstream(*line.format(tmp=tmp_path, foreign=FOREIGN).split())
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert reason in err
    assert err.count("\n") == 1


def test_verify_lists_the_problems_and_fails(mmstream, tmp_path):
    write_corpus(tmp_path, [3, 3])
    path = tmp_path / "shard-000001.tar"
    path.write_bytes(path.read_bytes()[:2000])
    code, out, err = mmstream("verify", tmp_path)
    assert code == 1
    assert all(line.startswith("bad: shard-000001.tar: ") for line in out.splitlines())
    assert err.splitlines()[-1].startswith(f"{len(out.splitlines())} problems in <Dataset ")


def test_verify_decode_names_the_types_that_it_only_read(mmstream, tmp_path):
    file = io.BytesIO()
    np.save(file, np.zeros(4))
    array = file.getvalue()

    def fields(number):
        others = {"txt": b"text", "2.txt": b"more"}
        if number < 2:
            others = {"npy": array[: len(array) - number]}
        return {"v2.json" if number == 4 else "json": b"{}", **others}

    write_corpus(tmp_path, [3, 2], fields)
    code, out, _ = mmstream("verify", tmp_path, "--decode")
    assert code == 1
    assert out.splitlines() == [
        "bad: shard-000000.tar[1] 000001.npy: npy: float64 (4,) needs 32 bytes, and the file "
        "has 31",
        "decoded: json (3 samples), npy (1 sample); not decoded: txt (3 samples), "
        "v2.json (1 sample): nothing here decodes them",
    ]
    assert mmstream("verify", tmp_path)[1] == "ok: 5 samples in 2 shards\n"


def test_verify_decode_lists_damaged_media_by_any_name(mmstream, tmp_path):
    video, audio = video_file(num_frames=30), audio_file("flac", seconds=1.0)
    good = {"mp4": video, "flac": audio, "input.jpg": jpeg(0), "target.jpg": jpeg(1)}
    damaged_at = video.index(b"mdat") + 4 + (video.index(b"moov") - video.index(b"mdat")) // 2
    damaged = {
        1: {"mp4": video[:damaged_at] + bytes(200) + video[damaged_at + 200 :]},
        2: {"target.jpg": b"\xff\xd8 no jpeg"},
        3: {"flac": audio[: len(audio) // 2]},
    }
    url = write_corpus(tmp_path, [5], lambda number: good | damaged.get(number, {}))
    assert mmstream("verify", url)[0] == 0  # no file is looked into
    code, out, _ = mmstream("verify", url, "--decode", "--write-bad")
    assert code == 1
    assert re.findall(r"^bad: shard-000000.tar\[(\d)\] \d+\.(.*?): ", out, re.MULTILINE) == [
        ("1", "mp4"),
        ("2", "target.jpg"),
        ("3", "flac"),
    ]
    assert "3 of 5 samples are left out" in out
    assert open_dataset(url).bad.tolist() == [[0, 1], [0, 2], [0, 3]]


def test_info_shows_what_it_can_of_a_corpus_with_a_bad_sample(mmstream, tmp_path):
    (tmp_path / "a.tar").write_bytes(make_tar([("a.txt", b"1"), ("b.txt", b""), ("b.txt", b"")]))
    code, out, err = mmstream("info", tmp_path)
    assert code == 0
    assert " keys: a\n" in out
    assert err == "bad: a.tar[1] b.txt: this field comes twice in the sample\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "\ninterrupted\n"), (signal.SIGTERM, 143, "terminated\n")],
    ids=["ctrl-c", "sigterm"],
)
def test_a_signal_in_a_real_process_closes_what_is_open(number, code, said):
    waiting = (
        "import signal, sys, time, mmstream.dataset.open as d; from mmstream.cli import main\n"
        # A shell without job control starts its background commands with Ctrl-C ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def wait(url, **_):\n"
        "    try:\n"
        "        print('ready', flush=True); time.sleep(200)\n"
        "    finally:\n"
        "        print('closed', flush=True)\n"
        "d.open_dataset = wait\n"
        "sys.argv = ['mmstream', 'info', 'x']; main()"
    )
    command = [sys.executable, "-c", waiting]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=500)
    assert (process.returncode, out, err) == (code, "closed\n", said)


@pytest.mark.slow
def test_the_module_and_the_script_run_without_torch(corpus):
    script = Path(sys.executable).with_name("mmstream")
    probe = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import runpy; sys.argv = ['mmstream', *sys.argv[1:]]\n"
        "runpy.run_module('mmstream', run_name='__main__')"
    )
    commands = [[sys.executable, "-m", "mmstream"], [sys.executable, "-c", probe]]
    commands += [[str(script)]] if script.exists() else []
    for command in commands:
        done = subprocess.run(
            [*command, "verify", corpus], capture_output=True, text=True, cwd=ROOT
        )
        assert (done.returncode, done.stdout) == (0, "ok: 97 samples in 5 shards\n"), done.stderr


def test_a_conversion_without_a_sample_fails_and_says_why(mmstream, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"image": "absent.jpg", "text": "a"}\n')
    convert = ("convert", tmp_path / "rows.jsonl", tmp_path / "out", "--num-workers", 1)
    for _ in range(2):
        code, out, err = mmstream(*convert)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith("error: none of 1 rows became a sample, so no dataset was written. ")
        assert "row 1: absent.jpg: no such file" in err
        assert "--media-root" in err
    assert mmstream("verify", tmp_path / "out")[0] == 1


def write_messy_rows(folder, num_good, num_absent, num_bad):
    rows = [{"text": f"row {i}"} for i in range(num_good)]
    rows += [{"image": f"images/{i}.jpg", "text": "x"} for i in range(num_absent)]
    rows += [{f"column{i}": "a cat"} for i in range(num_bad)]
    return write_rows(folder / "rows.jsonl", rows)


def test_rejects_are_grouped_by_reason_and_a_large_part_of_them_is_a_data_problem(
    mmstream, tmp_path
):
    rows = write_messy_rows(tmp_path, num_good=5, num_absent=2, num_bad=3)
    code, out, err = mmstream("convert", rows, tmp_path / "out", "--num-workers", 1)
    assert code == 1
    assert out.splitlines()[-3:] == [
        f"all rejected rows are in {tmp_path}/out/rejects.jsonl. "
        "The reasons, with one example each:",
        "  3 rows: row 8: no known format has the keys column0; name the columns with --map, "
        "such as --map text=KEY, or the format with --format, or make known rows of them with a "
        "function of yours, --format module:function",
        "  2 rows: row 6: images/0.jpg: no such file",
    ]
    assert err.endswith("5 of 10 rows were rejected, and --max-rejects 1% allows fewer\n")
    assert len(open_dataset(tmp_path / "out")) == 5


@pytest.mark.parametrize(
    ("limit", "code"), [("1%", 1), ("10%", 0), ("9.9%", 1), ("1", 0), ("0", 1), ("one", 2)]
)
def test_more_rejects_than_the_limit_are_a_data_problem(mmstream, tmp_path, limit, code):
    rows = write_messy_rows(tmp_path, num_good=9, num_absent=1, num_bad=0)
    words = ["convert", rows, tmp_path / "out", "--num-workers", 1, "--max-rejects", limit]
    assert mmstream(*words)[0] == code


def test_a_run_with_nothing_left_to_do_says_what_to_raise(mmstream, tmp_path):
    options = ["--max-steps", 1, "--global-batch-size", 4, "--image-size", 16, "--num-workers", 0]
    options += ["--device", "cpu", "--out", tmp_path / "run"]
    corpus = write_corpus(tmp_path / "corpus", [8])
    assert "1 step, last loss " in mmstream("train", corpus, *options)[1]
    out = mmstream("train", corpus, *options)[1]
    assert out.startswith(
        "1 step, nothing left to do; to train on, raise --max-steps or --epochs; "
    )
    code, _, err = mmstream("train", corpus, *options, "--max-steps", 2, "--seed", 3)
    assert code == 1
    assert err.splitlines()[-1].startswith(
        f"error: {tmp_path}/run/checkpoints: step 1: the state of epoch 0 step 1 does not fit"
    )
    assert "--on-change finish_epoch ends this epoch as it was planned" in err
