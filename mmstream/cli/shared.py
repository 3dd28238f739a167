"""What all commands share: help that starts with an example, exit codes, one-line messages.

The library's messages name its arguments, such as ``overwrite=True``. A command shows its option
instead, ``--overwrite``.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from itertools import dropwhile
from pathlib import Path
from typing import Any

import click

from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.settings import instead_of

PROBLEM = 1
"""Exit code: a problem with the data or the storage."""
USAGE = 2
"""Exit code: a wrong command line."""
UNFINISHED = 75
"""Exit code: stopped before the end because some ranks were told to; the same command goes on."""
INTERRUPTED = 130
"""Exit code: Ctrl-C, as of a shell (128 + SIGINT)."""
TERMINATED = 143
"""Exit code: SIGTERM, as of a shell (128 + SIGTERM)."""

AT_LEAST_0 = click.IntRange(min=0)
AT_LEAST_1 = click.IntRange(min=1)


allow_foreign_urls = click.option(
    "--allow-foreign-urls",
    is_flag=True,
    default=False,
    help="Follow a manifest that says that the tars lie outside of URL, or a mixture's file that "
    "names other servers. Only for files that you trust.",
)


def say(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Print one line. What a terminal would obey in names, keys and texts of data is escaped."""
    click.echo(escaped(text, limit=None), err=err, nl=nl)


def refuse_given(names: Collection[str], reason: str) -> None:
    """Raise a usage error where one of these options stands on the command line."""
    context = click.get_current_context()
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if param.name in names and source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{param.opts[0]} would do nothing here: it goes {reason}")


class Command(click.Command):
    """A command. An option that is gone is an error that says what to use."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if reason := instead_of(f"mmstream {ctx.info_name} {error.option_name}"):
                raise click.UsageError(reason, ctx) from None
            raise


def command(example: str, **names: str) -> Callable[[Callable[..., None]], click.Command]:
    """Decorate a function to be a command.

    Its help is the example, then the docstring.

    Args:
        example: A command line to copy.
        names: Argument of the library -> option, where the two have different names.
    """

    def wrap(function: Callable[..., None]) -> click.Command:
        @wraps(function)
        def call(*args: Any, **options: Any) -> None:
            try:
                function(*args, **options)
            except MMStreamError as error:
                params = click.get_current_context().command.params
                options_of_command = {
                    param.name or "": param.opts[0]
                    for param in params
                    if isinstance(param, click.Option)
                }
                message = in_options(str(error), options_of_command | names)
                raise type(error)(message) from error

        text = inspect.getdoc(function) or ""
        help_text = f"\b\n{example}\n\n{text}"  # \b: click must not wrap the example
        return click.command(cls=Command, help=help_text)(call)

    return wrap


def in_options(message: str, options: Mapping[str, str]) -> str:
    """Return a message of the library with options instead of arguments.

    Three things in a message are taken for an argument: ``name=value``, a name at its start before
    a colon or " is ", and a name with an underscore. Other words stay, also when they are the name
    of an argument, such as "model" or "epochs".

    Args:
        message: A message of the library.
        options: Argument -> option.

    Examples:
        >>> in_options("replace it with overwrite=True", {"overwrite": "--overwrite"})
        'replace it with --overwrite'
        >>> in_options('give TextDecoder(field="json.a")', {"field": "--text-field"})
        'give --text-field "json.a"'
    """
    name = f"({'|'.join(sorted(options, key=len, reverse=True))})"
    long_name = f"({'|'.join(name for name in options if '_' in name) or '(?!)'})"
    free = r"(?<![-\w./])"  # not inside a path or an option
    message = message.removesuffix(" or None")  # no option takes it
    for pattern, form in (
        (rf"\b(?:Loader|TextDecoder|rerun=mm\.Rerun)\({name}=([^()]*)\)", r"\1=\2"),
        (rf"{free}{name}=True\b", "{}"),
        (rf"""{free}{name}=(['"])([\w-]*)\2""", r"{} \3"),
        (rf"{free}{name}=(?=[^\s,;)])", "{} "),
        (rf"{free}{name}=", "{}"),
        (rf"^(?:train: )?{name}(?=: | is )", "{}"),
        (rf"{free}{long_name}(?![\w./])", "{}"),
    ):

        def with_option(match: re.Match[str], form: str = form) -> str:
            return match.expand(form.replace("{}", options[match[1]]))

        message = re.sub(pattern, with_option, message)
    return message


def open_tokenizer(folder: str) -> Any:
    """Return the tokenizer of a folder, with a chat template where there is one."""
    from mmstream.train import tokenizer

    if folder == "bytes":
        return tokenizer.byte_tokenizer(chat=True)
    try:
        return tokenizer.open_tokenizer(folder, chat=True)
    except ConfigError:
        return tokenizer.open_tokenizer(folder)


def text_counter(folder: str, max_length: int) -> Any:
    """Return a `WholeText`, which keeps what nothing decodes.

    Args:
        folder: Of a tokenizer, or of a whole model whose processor says what media take.
        max_length: Of texts, in tokens.
    """
    from mmstream.decoding.decode import Decode
    from mmstream.decoding.sample import WholeText
    from mmstream.decoding.text.decoder import TextDecoder
    from mmstream.train.models import CHAT_FAMILIES, chat_decode
    from mmstream.train.tokenizer import image_settings, read_json

    tokenizer = open_tokenizer(folder)
    config = Path(folder, "config.json")
    family = read_json(config).get("model_type") if config.exists() else None
    decode: Any = Decode(text=TextDecoder(tokenizer))
    if family in CHAT_FAMILIES and image_settings(Path(folder))[0] is not None:
        decode = chat_decode(tokenizer, folder, max_length)
    settings: Any = {"undecoded_parts": "keep", "unlabeled_texts": "keep"}
    text = replace(decode.text, max_length=max_length, **settings)
    return WholeText(replace(decode, text=text))


def load_pipeline(name: str, data: Any) -> Any:
    """Return the pipeline that ``module:object`` names, with other data.

    Args:
        name: Of a `mm.Pipeline`, or of a function that takes the data and returns one.
        data: A Dataset or a Mixture.

    Raises:
        ConfigError: There is no such module or name, it is something else, or it raised an error,
            whose traceback is printed before.
    """
    from mmstream.converting.formats.formats import load_object
    from mmstream.pipeline import Pipeline

    try:
        value = load_object(name)
        if not isinstance(value, Pipeline) and callable(value):
            value = value(data)
    except MMStreamError:
        raise
    except Exception as error:
        for line in "".join(_of_user(error)).splitlines():
            say(line, err=True)
        raise ConfigError(f"{name}: raised {type(error).__name__}: {escaped(error)}") from error
    if not isinstance(value, Pipeline):
        raise ConfigError(
            f"{name}: is {type(value).__name__}, and no mm.Pipeline or function from a dataset to "
            "one"
        )
    return value if value.dataset is data else replace(value, dataset=data)


def _of_user(error: Exception) -> list[str]:
    """Return the traceback of an error, from the first line of code that is not ours."""
    ours = (str(Path(__file__).parents[1]), str(Path(importlib.__file__).parent), "<frozen ")
    frames = traceback.extract_tb(error.__traceback__)
    of_user = dropwhile(lambda frame: frame.filename.startswith(ours), frames)
    return [*traceback.format_list(of_user), *traceback.format_exception_only(error)]


@contextmanager
def usage(message: str) -> Iterator[None]:
    """Turn a ValueError into a message about the command line, with exit code 2."""
    try:
        yield
    except ValueError:
        raise click.UsageError(message) from None


def parse_rows_per_rank(text: str) -> list[int]:
    """Return the numbers of ``--rows-per-rank N,N,...``."""
    with usage(f"--rows-per-rank {text!r}: write N,N,..."):
        return [int(number) for number in text.split(",")]


@contextmanager
def shows_infos_of(name: str) -> Iterator[None]:
    """Print what a module logs at INFO, too: what it is about to do, and how long that takes."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)


def save_page(body: str, title: str, path: str) -> str:
    """Write a page for a browser, and return where it is and its size, in words."""
    from mmstream.display.samples import Shown

    written = Shown(body, title).save(path)
    return f"written to {written} ({written.stat().st_size / 1e6:,.1f} MB)"


def plan_beside(data: Any, state: Any) -> Any:
    """Return the plan of a saved state of packs, from beside the index.

    None: there is none, or the state is not of packs. Without packs, torch is not imported.
    """
    order = state.get("order") if isinstance(state, Mapping) else None
    if not isinstance(order, Mapping) or "plan" not in order:
        return None
    from mmstream.batching.lengths import plan_or_plans_of_state

    return plan_or_plans_of_state(data, state)
