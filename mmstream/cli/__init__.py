"""The command line. Each command parses its options, calls the library, and prints a summary.

    shared.py    what all commands share: help, exit codes, messages
    convert.py   convert, finalize, reshard, and what they print in the end
    data.py      index, verify, takedown
    pipeline.py  bench, plan, bake
    info.py      info, show, view
    duplicates.py  duplicates, leakcheck
    training.py  train, demo, replay
    select.py    select, and the options that choose samples

Exit codes: 0 success, 1 a problem with the data or the storage, 2 a wrong command line, 130
interrupted, 143 ended by SIGTERM; train also has 75 (docs: command line). Only this package prints;
the others log. Only train, demo, plan, bake, bench and what decodes import torch.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from collections import UserDict
from importlib import import_module
from typing import Any, NoReturn

import click

from mmstream.cli.shared import INTERRUPTED, PROBLEM, TERMINATED, USAGE, say
from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.settings import instead_of

__all__ = ["cli", "main"]


class _Commands(UserDict[str, Any]):
    """{name: command}, of {name: (module, first line of its help)}.

    A command's module is imported when the command is asked for. The list of all commands imports
    none.
    """

    def __getitem__(self, name: str) -> click.Command:
        module, _ = self.data[name]
        command: click.Command = getattr(import_module(f"mmstream.cli.{module}"), name)
        return command


class _Group(click.Group):
    """All commands. One that is gone is an error that says what to use."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names."""
        if reason := instead_of(f"mmstream {args[0]}"):
            ctx.fail(reason)
        return super().resolve_command(ctx, args)

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 - of click
        formatter: click.HelpFormatter,
    ) -> None:
        """Write the list of commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in sorted(COMMANDS.data.items())])


COMMANDS = _Commands(
    bake=(
        "pipeline",
        "Write what a pipeline makes of the dataset SOURCE to DEST, once for all epochs.",
    ),
    bench=(
        "pipeline",
        "Measure how fast the data at URL becomes batches here, and say which settings to use.",
    ),
    convert=("convert", "Convert ROWS and their media to tar shards at DEST."),
    demo=(
        "training",
        "Convert, train, kill -9, resume, and prove the result, on an embedded corpus of 96 "
        "images.",
    ),
    duplicates=(
        "duplicates",
        "Find samples of the dataset at URL that come twice, and images that look alike.",
    ),
    finalize=(
        "convert",
        "Make a dataset of the shards at DEST that `mmstream convert --shard-range` wrote.",
    ),
    index=("data", "Index tars at URL that other tools wrote, so that they open quickly."),
    info=("info", "Show what the dataset at URL holds: shards, samples, fields, bytes, some keys."),
    leakcheck=(
        "duplicates",
        "Find what the datasets A and B share, such as a training set and a benchmark.",
    ),
    plan=(
        "pipeline",
        "Measure all samples of the dataset at URL, and plan packs of at most --max-tokens tokens.",
    ),
    replay=("training", "Print the planned samples of a step: epoch, step, row, shard[index]."),
    reshard=(
        "convert",
        "Rewrite the dataset SOURCE as DEST, so that each pack is one range of a shard.",
    ),
    select=(
        "select",
        "Store which samples of the dataset at URL take part, once for all processes and runs.",
    ),
    show=(
        "info",
        "Show samples of the dataset at URL: pictures, captions, conversations, recordings, JSON.",
    ),
    takedown=("data", "Take samples of the dataset at URL down: no run shows them any more."),
    train=(
        "training",
        "Train a small CLIP or VLM, or the model of a folder, on the dataset at URL.",
    ),
    verify=(
        "data",
        "Read the whole dataset at URL and check checksums, indexes and every sample.",
    ),
    view=("info", "Look at the dataset at URL, or at a mixture, in a browser of this machine."),
)


@click.group(
    cls=_Group,
    commands=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(
    sys.modules["mmstream"].__version__,  # as imported: the metadata may be that of another copy
    prog_name="mmstream",
)
def cli() -> None:
    """Multimodal training data on plain WebDataset tars.

    To see all of it at work, run `mmstream demo`. For an example and the options of a command, run
    `mmstream COMMAND --help`.
    """


class _OneLine(logging.Formatter):
    """Escapes messages, of other libraries too. A traceback below a message keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of logging
        return escaped(super().formatMessage(record), limit=None)


class _Terminated(SystemExit):
    """SIGTERM came. What is open is closed as after Ctrl-C."""


def _terminate(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would disturb that
    raise _Terminated


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    if sys.argv[1:2] not in (["train"], ["demo"]):  # a run that trains saves itself first
        signal.signal(signal.SIGTERM, _terminate)
    handler = logging.StreamHandler()
    handler.setFormatter(
        _OneLine(f"%(levelname).1s [rank {os.environ.get('RANK', '0')}] %(message)s")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name in a tar may hold any bytes
    try:
        cli.main(prog_name="mmstream", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        say("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except _Terminated:
        say("terminated", err=True)
        sys.exit(TERMINATED)
    except ConfigError as error:
        say(f"usage: {error}", err=True)
        sys.exit(USAGE)
    except (MMStreamError, OSError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            reason = f"{error.filename}: {error.strerror}"  # without [Errno 2]
        say(f"error: {reason}", err=True)
        sys.exit(PROBLEM)
    sys.exit(0)
