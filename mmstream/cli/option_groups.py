"""The help of a command with many options: a heading for each group of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from mmstream.gone import instead_of


class GroupedCommand(click.Command):
    """A command whose help lists its options in groups.

    Args:
        groups: {heading: options}, such as ``{"Media": ["--media-root"]}``. An option that no group
            names comes last.
    """

    def __init__(
        self, *args: Any, groups: Mapping[str, Sequence[str]] | None = None, **attributes: Any
    ) -> None:
        super().__init__(*args, **attributes)
        self.groups: Mapping[str, Sequence[str]] = groups or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line. An option that is gone is an error that says what to use."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if reason := instead_of(f"mmstream {ctx.info_name} {error.option_name}"):
                raise click.UsageError(reason, ctx) from None
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a section for each group."""
        if not self.groups:
            super().format_options(ctx, formatter)
            return
        records = {
            name: record
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            and (record := param.get_help_record(ctx)) is not None
            for name in param.opts[:1]
        }
        grouped = {name for names in self.groups.values() for name in names}
        others = [name for name in records if name not in grouped]
        for heading, names in [*self.groups.items(), ("Other options", others)]:
            shown = [records[name] for name in names if name in records]
            if shown:
                with formatter.section(heading):
                    formatter.write_dl(shown)
