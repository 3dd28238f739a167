"""Make the pictures of README.md again: ``python -m tools.pictures OUT``.

    docs/assets/resume.png        the losses of `mmstream demo --out OUT`, which ran before
    docs/assets/conversation.png  `mm.show` of a conversation, as a headless Chromium draws it

The photograph is 000000012667.jpg of the embedded corpus; its ATTRIBUTION.md names the source.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image, ImageChops

import mmstream as mm
from mmstream.audit import read_history
from mmstream.train.demo import CHECKPOINT_EVERY, KILL_STEP, corpus_rows
from mmstream.train.tokenizer import byte_tokenizer

ASSETS = Path(__file__).resolve().parent.parent / "docs" / "assets"
PHOTOGRAPH = "images/000000012667.jpg"
TURNS = (
    ("human", "<image>\nWhat is odd about this telephone?"),
    ("gpt", "A banana replaces the phone on an answering machine."),
    ("human", "Say it in other words."),
    ("gpt", "The telephone has a banana where the receiver should be."),
)
MARGIN = 16
"""Around the picture of a conversation, in pixels."""


def main() -> None:
    """Make both pictures."""
    draw_losses(Path(sys.argv[1]), ASSETS / "resume.png")
    with tempfile.TemporaryDirectory() as folder:
        draw_conversation(Path(folder), ASSETS / "conversation.png")


def draw_losses(demo: Path, path: Path) -> None:
    """Draw the losses of the undisturbed run, and over them those of the run that was killed."""
    figure, axes = plt.subplots(figsize=(7.6, 3.2), layout="constrained")
    undisturbed, disturbed = (
        [line for _, line in sorted(read_history(demo / name).lines.items())]
        for name in ("undisturbed", "disturbed")
    )
    axes.plot([line["loss"] for line in undisturbed], color="#c9c9c9", linewidth=6)
    parts = [(2, "#1f6fb4", "2 processes"), (1, "#d9601a", "1 process, resumed")]
    for world_size, colour, name in parts:
        points = [(n, e["loss"]) for n, e in enumerate(disturbed) if e["world_size"] == world_size]
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.3, label=name)
    resumed = KILL_STEP // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    axes.axvline(KILL_STEP, color="black", linewidth=1, linestyle=":")
    axes.annotate(
        f"kill -9 at step {KILL_STEP}, resumed at {resumed}",
        (KILL_STEP + 2, axes.get_ylim()[1] * 0.93),
    )
    axes.lines[0].set_label("never killed")
    axes.set(xlabel="step", ylabel="loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def draw_conversation(folder: Path, path: Path) -> None:
    """Draw a conversation and its tokens, with the learned ones in colour."""
    turns = [{"from": who, "value": text} for who, text in TURNS]
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"image": PHOTOGRAPH, "conversations": turns}) + "\n")
    media = Path(corpus_rows()).parent
    mm.convert(rows, folder / "shards", media_root=media, progress=False)
    tokenizer = byte_tokenizer(chat=True)
    decode = mm.Decode(
        image=mm.ImageDecoder(size=224), text=mm.TextDecoder(tokenizer, image_length=196)
    )
    pipeline = mm.Pipeline(
        mm.open_dataset(folder / "shards"), global_batch_size=1, seed=0, decode=decode
    )
    page, screenshot = folder / "page.html", folder / "screenshot.png"
    mm.show(pipeline.take(1), tokenizer=tokenizer).save(page)
    page.write_text(page.read_text() + "<style>table {display: none}</style>")  # of all fields
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--window-size=760,900", f"--user-data-dir={folder}", f"--screenshot={screenshot}"]
    subprocess.run([*command, page.as_uri()], check=True, capture_output=True)
    picture = Image.open(screenshot).convert("RGB")
    _, upper, _, lower = ImageChops.invert(picture).getbbox() or (0, 0, 0, 0)
    box = (0, upper - MARGIN, picture.width, lower + MARGIN)
    picture.crop(box).save(path, optimize=True)


if __name__ == "__main__":
    main()
