"""What the pages write, each after a question: a selection, and the bad list.

A form is taken only with the token in it, besides what `app.Guard` asks of every request.
"""

from __future__ import annotations

import hmac
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import numpy as np
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from mmstream.dataset.bad_list import BAD_NAME, read_bad_names, read_listed, write_bad
from mmstream.dataset.select import rule_of, store_selection
from mmstream.errors import ConfigError, MMStreamError, where
from mmstream.storage.write_lock import write_lock
from mmstream.types import IntArray
from mmstream.view.content import Choice
from mmstream.view.pages import link, number_of, show
from mmstream.view.samples import choice_of

MAX_FORM_BYTES = 64 << 10
"""Longest body of a request."""


async def _answered(
    request: Request, answer: Callable[[Request, Mapping[str, str]], Response]
) -> Response:
    """Return the answer to a form, which is read here. A form without the token gets none."""
    if not request.headers.get("content-length", "").isdecimal():
        return Response("give the length of the form", 411)
    if int(request.headers["content-length"]) > MAX_FORM_BYTES:
        return Response("the form is too long", 413)
    values = dict(parse_qsl((await request.body()).decode("utf-8", "replace")))
    if not hmac.compare_digest(values.get("token", "").encode(), request.app.state.token.encode()):
        return Response("the form is of another server", 403)
    return await run_in_threadpool(answer, request, values)


# -- a selection -----------------------------------------------------------------------------------


def select_question(request: Request) -> Response:
    """Ask before a selection is written."""
    return _about_selection(request, choice_of(request, request.query_params))


async def select(request: Request) -> Response:
    """Write the chosen samples down under a name."""
    return await _answered(request, _select)


def _about_selection(
    request: Request, choice: Choice, name: str = "", problem: str = "", written: str = ""
) -> Response:
    return show(
        request,
        "question.html",
        choice=choice,
        name=name,
        quoted_name=shlex.quote(name),
        problem=problem or choice.problem,
        written=written,
        token=request.app.state.token,
    )


def _select(request: Request, values: Mapping[str, str]) -> Response:
    choice = choice_of(request, values)
    name = values.get("name", "").strip()
    if choice.problem or not len(choice.dataset):
        return _about_selection(request, choice, name, "no sample is chosen")
    options = {"--select": choice.select, "--where": choice.where}
    words = [word for option, value in options.items() if value for word in (option, value)]
    text = rule_of(choice.where).text if choice.where and not choice.select else None
    try:
        record = store_selection(
            choice.dataset, shlex.join(words) or "all", text=text, name=name, overwrite=False
        )
    except (MMStreamError, OSError) as error:
        return _about_selection(request, choice, name, str(error))
    url = choice.dataset.index_store.url_of(f"mmstream.select.{record.digest}")
    return _about_selection(request, choice, name, written=url)


# -- the bad list ----------------------------------------------------------------------------------


class Change(NamedTuple):
    """A change of the bad list of a dataset, before it is made."""

    dataset: Any
    text: str
    """Which samples, in words."""
    refs: IntArray
    """int64 [n, 2] (shard, index) of these samples in their dataset."""
    takes_off: bool
    """Take them off the list, in place of putting them there."""
    fields: dict[str, object]
    """Of the form, so that it names the same samples again."""
    back: Markup


def bad_question(request: Request) -> Response:
    """Ask before samples are put on the bad list, or taken off it."""
    return _about_bad(request, _change_of(request, request.query_params))


async def bad(request: Request) -> Response:
    """Put samples on the bad list, or take them off it."""
    return await _answered(request, _write_bad)


def _change_of(request: Request, values: Mapping[str, str]) -> Change:
    """Return what an address or a form is about: one sample, or those that a condition chooses.

    Raises:
        ConfigError: There is no such sample, or none is chosen, or several folders are one dataset.
    """
    content = request.app.state.content
    takes_off = values.get("off") == "1"
    if values.get("shard"):
        ref = number_of(values, "shard"), number_of(values, "index")
        dataset, own_shard = content.locate(*ref)
        text, refs = where(content.data.name_of(ref[0]), ref[1]), np.array([(own_shard, ref[1])])
        fields: dict[str, object] = {"shard": ref[0], "index": ref[1]}
        back = link("sample", *ref)
    else:
        choice = choice_of(request, values)
        if choice.problem or not (choice.where or choice.select) or not len(choice.dataset):
            raise ConfigError(choice.problem or "choose samples by a condition or a selection")
        dataset = content.source(choice.source).dataset
        of_shards = map(choice.dataset.indexes_of, range(dataset.num_shards))
        refs = np.concatenate(
            [
                np.stack([np.full_like(indexes, shard), indexes], axis=1)
                for shard, indexes in enumerate(of_shards)
            ]
        )
        clauses = {"where": choice.where, "of the selection": choice.select}
        words = " ".join(f"{word} {value}" for word, value in clauses.items() if value)
        text = f"{len(refs):,} samples {words}"
        fields, back = dict(choice.query), link("", **choice.query)
    if dataset.folders:
        raise ConfigError(
            "the dataset is of several folders: open the one with these samples alone"
        )
    fields |= {"off": "1"} if takes_off else {}
    return Change(dataset, text, refs, takes_off, fields, back)


def _about_bad(
    request: Request, change: Change, problem: str = "", num_listed: int | None = None
) -> Response:
    return show(
        request,
        "bad.html",
        change=change,
        problem=problem,
        num_listed=num_listed,
        file=change.dataset.index_store.url_of(BAD_NAME),
        token=request.app.state.token,
    )


def _write_bad(request: Request, values: Mapping[str, str]) -> Response:
    change = _change_of(request, values)
    dataset = change.dataset
    try:
        with write_lock(dataset.index_store, "view"):
            with suppress(FileNotFoundError):
                read_bad_names(dataset.index_store)  # a damaged list is not replaced
            listed = read_listed(dataset, "bad")
            if change.takes_off:
                listed = listed[~np.isin(listed @ (1 << 32, 1), change.refs @ (1 << 32, 1))]
            else:
                listed = np.unique(np.concatenate([listed, change.refs]), axis=0)
            write_bad(dataset, listed)
    except (MMStreamError, OSError) as error:
        return _about_bad(request, change, str(error))
    return _about_bad(request, change, num_listed=len(listed))
