"""What a conversion prints when it ends, and its exit code.

convert, finalize -> `show_end` -> `show_summary`
"""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING

import click

from mmstream.cli.shared import PROBLEM, say, usage
from mmstream.display.markup import count_text
from mmstream.errors import escaped

if TYPE_CHECKING:
    from mmstream.converting.convert import ConvertReport

MAX_REASONS = 20
"""Reasons of rejects that are printed, the most frequent first."""

max_rejects_option = click.option(
    "--max-rejects",
    metavar="NUMBER",
    default="1%",
    show_default=True,
    help="The exit code is 1 if more rows are rejected: a percentage (0.5%) or a number of rows.",
)


def show_end(report: ConvertReport, dest: str, max_rejects: str) -> None:
    """Print what a conversion did, and exit with 1 if it rejected too much.

    Args:
        report: Of the conversion.
        dest: Where it wrote to.
        max_rejects: The option.
    """
    limit = max_rejects_of(max_rejects)
    show_summary(report)
    for name, split in report.splits.items():
        say(f"  {name}: {split.summary()}")
    if report.num_pairs:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in report.num_pairs.items())
        say(f"duplicates: {counts}; the pairs are in duplicates.jsonl")
    if report.num_dropped:
        say(
            f"{report.num_dropped:,} of {report.num_samples:,} samples are left out of epochs as "
            "duplicates"
        )
    _show_formats(report)
    _show_unread(report)
    _show_rejects(report, dest)
    if report.has_more_rejects_than(limit):
        say(
            f"the dataset at {dest} is complete; the exit code is {PROBLEM} because "
            f"{report.num_rejects - report.num_left_out:,} of {count_text(report.num_rows, 'row')} "
            f"were rejected, and --max-rejects {max_rejects} allows fewer",
            err=True,
        )
        sys.exit(PROBLEM)


def max_rejects_of(text: str) -> float:
    """Return the fraction of ``1%``, or the number of ``50``."""
    from mmstream.converting.convert import check_max_rejects

    with usage(f"--max-rejects {text!r}: write a percentage such as 1%, or a number of rows"):
        limit = float(text.removesuffix("%")) / 100 if text.endswith("%") else int(text)
    check_max_rejects(limit)
    return limit


def show_summary(report: ConvertReport) -> None:
    """Print the counts, the bytes and the time."""
    summary = f"{report.summary()}; {report.num_bytes / 1e6:,.1f} MB"
    if report.was_finished and report.num_repaired:
        say(f"{summary}, converted before; {report.num_repaired:,} damaged shards written again")
    elif report.was_finished:
        say(f"{summary}, all converted before; to convert again, use --overwrite")
    else:
        say(f"{summary} in {report.seconds:.1f} s ({report.mb_per_s:.0f} MB/s)")


def show_retry(report: ConvertReport) -> None:
    """Print what became of the rows that an earlier run had rejected."""
    if report.num_retried:
        say(f"{report.num_recovered:,} of {report.num_retried:,} rejected rows became samples")
    else:
        say("nothing to retry: no row was rejected")


def _show_formats(report: ConvertReport) -> None:
    """Print how rows were read, if not all alike: a picture without its text is another format."""
    if len(report.formats) > 1:
        formats = ", ".join(
            f"{name} ({count_text(n, 'row')})" for name, n in report.formats.items()
        )
        say(f"rows were read as: {formats}")


def _show_unread(report: ConvertReport) -> None:
    """Print the keys that nothing read, if there are some."""
    if not report.unread_keys:
        return
    keys = [
        f"{escaped(key)} ({count_text(n, 'row')})"
        for key, n in islice(report.unread_keys.items(), 12)
    ]
    if len(report.unread_keys) > len(keys):
        keys.append(f"{len(report.unread_keys) - len(keys):,} others")
    say(f"keys that nothing read (kept in json): {', '.join(keys)}")


def _show_rejects(report: ConvertReport, dest: str) -> None:
    """Print where a conversion lists its rejects, and their reasons with one example each."""
    from mmstream.converting.report import REJECTS_NAME, REPORT_NAME

    groups = report.reject_kinds
    if not groups:
        return
    folder = dest.rstrip("/") + "/NAME" * bool(report.splits)
    say(f"all rejected rows are in {folder}/{REJECTS_NAME}. The reasons, with one example each:")
    for group in groups[:MAX_REASONS]:
        row, reason = group.example.row, escaped(group.example.reason)
        say(f"  {count_text(group.num_rows, 'row')}: row {row}: {reason}")
    num_others = report.num_rejects - sum(group.num_rows for group in groups[:MAX_REASONS])
    if num_others:
        say(f"  {count_text(num_others, 'row')}: other reasons; see {folder}/{REPORT_NAME}")
