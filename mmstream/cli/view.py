"""``mmstream view``: look at a corpus, at what a model gets, and at what a run did."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import click

from mmstream.cli.shared import allow_foreign_urls, command, load_pipeline, plan_beside, say
from mmstream.errors import ConfigError, StorageError

logger = logging.getLogger(__name__)


@command("mmstream view s3://bucket/corpus --pipeline train:pipeline --run run/")
@click.argument("url")
@click.option(
    "--pipeline",
    metavar="MODULE:OBJECT",
    help="A mm.Pipeline, or a function from the data to one: shows what the model gets, and when.",
)
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The --out folder of `mmstream train`: its metrics, its quarantine files and its order.",
)
@click.option(
    "--against",
    "others",
    metavar="URL",
    multiple=True,
    help="Another dataset, such as a benchmark: shows what both hold. Repeatable.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8600,
    show_default=True,
    help="On 127.0.0.1. 0: a free one.",
)
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@allow_foreign_urls
def view(
    url: str,
    pipeline: str | None,
    run: Path | None,
    others: tuple[str, ...],
    port: int,
    no_browser: bool,
    allow_foreign_urls: bool,
) -> None:
    """Look at the dataset at URL, or at a mixture, in a browser of this machine.

    Pages show samples, what a model gets of each, the steps of each rank, what was rejected or
    replaced, statistics, and the metrics of a run. It answers on loopback only, to whoever knows
    the address that it prints. Ctrl-C ends it. It writes only selections and the bad list, after a
    question.
    """
    from mmstream.dataset.mixture import open_data
    from mmstream.dataset.open import open_dataset

    if run is not None and not run.is_dir():
        raise click.UsageError(f"--run {run}: no such folder")
    try:
        from mmstream.view.app import serve
        from mmstream.view.content import Content
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise ConfigError(
            f"`mmstream view` needs {error.name}: pip install 'mmstream[view]'"
        ) from None

    def run_order(data: Any) -> Any:
        from mmstream.cli.replay import read_state
        from mmstream.state import order_of_state

        state = read_state(str(run))
        return order_of_state(state, data, plan_beside(data, state))[0]

    content = Content(
        url,
        lambda: open_data(url, allow_foreign_urls=allow_foreign_urls),
        None if pipeline is None else lambda data: load_pipeline(pipeline, data),
        None if run is None else run_order,
        run,
        others=[
            Content(
                other,
                partial(open_dataset, other, allow_foreign_urls=allow_foreign_urls),
                path=("against", number),
            )
            for number, other in enumerate(others)
        ],
    )
    try:
        _ = content.data, content.pipeline, [other.data for other in content.others]
    except StorageError as error:  # it may come back, and the pages of the run need no store
        logger.warning("%s", error)
    serve(content, port, opens=not no_browser, say=say)
