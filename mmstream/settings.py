"""Settings: arguments are compared with their annotations, and old names say what replaces them.

Ground floor. `checked` decorates public classes and functions. An annotation tells the types, and
aliases such as `PositiveInt` the bounds too. What depends on several arguments is checked by the
class or function itself.

`INSTEAD` lists what went away in this version. The command line asks for commands and options, the
package for its public names, and `checked` for arguments.
"""

from __future__ import annotations

import inspect
import math
import operator
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache, wraps
from reprlib import Repr
from types import MappingProxyType, NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from mmstream.errors import ConfigError, MMStreamError, escaped

F = TypeVar("F", bound=Callable[..., Any])

MAX_NUMBER = 2**63 - 1
"""Larger numbers do not fit into arrays."""


class Within(NamedTuple):
    """The bounds of a number or of the length of a text, and what a message says of them."""

    least: float
    most: float
    description: str


PositiveInt: TypeAlias = Annotated[int, Within(1, MAX_NUMBER, "a whole number from 1 up")]
NonNegativeInt: TypeAlias = Annotated[int, Within(0, MAX_NUMBER, "a whole number from 0 up")]
AnyInt: TypeAlias = Annotated[int, Within(-math.inf, math.inf, "a whole number")]
PositiveFloat: TypeAlias = Annotated[float, Within(math.ulp(0), MAX_NUMBER, "a number above 0")]
Seconds: TypeAlias = Annotated[float, Within(0.001, 1e9, "a number of seconds above 0")]
NonNegativeFloat: TypeAlias = Annotated[float, Within(0, MAX_NUMBER, "a number from 0 up")]
Fraction: TypeAlias = Annotated[float, Within(0, 1, "a number from 0 to 1")]
NonEmptyStr: TypeAlias = Annotated[str, Within(1, MAX_NUMBER, "text that is not empty")]
Level: TypeAlias = Annotated[int, Within(0, 255, "a whole number from 0 to 255")]

_INT = Within(-MAX_NUMBER, MAX_NUMBER, "a whole number")
_FLOAT = Within(-MAX_NUMBER, MAX_NUMBER, "a number")


def checked(
    advice: Mapping[str, str] = MappingProxyType({}),
    *,
    own: Collection[str] = (),
    late: bool = False,
    cure: str = "",
) -> Callable[[F], F]:
    """Return a decorator: an argument that does not fit its annotation is a ConfigError.

    Numbers of numpy, and what stands for an int, are taken as Python's. Lists are taken as tuples.
    True, False, NaN and infinity are not numbers. Protocols count where they are
    `runtime_checkable`. Python's own errors stay for arguments that are missing or unknown.

    Args:
        advice: What to write, by the name of an argument. It replaces the words for wrong values.
            For an argument that the class or function does not have, it is the message.
        own: Names of arguments that the class or function checks itself. Their annotations need
            not exist at run time.
        late: Only the arguments of a call that failed are looked at: for functions that are called
            for each sample or batch.
        cure: What to write where arguments fit and the call fails: for functions that read an
            object of a stranger, such as a config of transformers. They are looked at late.

    Examples:
        >>> @checked({"batch_size": "write global_batch_size="})
        ... def run(global_batch_size: PositiveInt, mode: Literal["fast", "slow"] = "fast"): ...
        >>> run(True)
        Traceback (most recent call last):
        mmstream.errors.ConfigError: global_batch_size=True: give a whole number from 1 up
        >>> run(2, "quick")
        Traceback (most recent call last):
        mmstream.errors.ConfigError: mode='quick': give 'fast' or 'slow'
        >>> run(batch_size=2)
        Traceback (most recent call last):
        mmstream.errors.ConfigError: run has no batch_size=: write global_batch_size=
    """

    def decorated(target: Any) -> Any:
        is_class = isinstance(target, type)
        function = target.__init__ if is_class else target
        unknown = advice.keys() - inspect.signature(function).parameters.keys()
        arguments_of = _checker(function, advice, own)

        @wraps(function)
        def call(*args: Any, **arguments: Any) -> Any:
            for name in arguments.keys() & unknown:
                raise ConfigError(f"{target.__name__} has no {name}=: {advice[name]}")
            bound = arguments_of(args, arguments)
            return function(*bound.args, **bound.kwargs) if bound else function(*args, **arguments)

        @wraps(function)
        def late_call(*args: Any, **arguments: Any) -> Any:
            try:
                return function(*args, **arguments)
            except MMStreamError:
                raise
            except Exception as error:
                arguments_of(args, arguments)
                if not cure:
                    raise
                raise ConfigError(f"{cure} ({type(error).__name__}: {escaped(error)})") from error

        if not is_class:
            return late_call if late or cure else call
        target.__init__ = call
        return target

    return decorated


def _checker(
    function: Callable[..., Any], advice: Mapping[str, str], own: Collection[str]
) -> Callable[[tuple[Any, ...], dict[str, Any]], inspect.BoundArguments | None]:
    """Return what compares the arguments of a call with the annotations, and returns them.

    It returns None where one is missing or too many, because Python's own error names that.
    """
    signature = inspect.signature(function)

    @cache
    def hints() -> dict[str, Any]:  # at the first call: annotations may name later classes
        texts = {k: v for k, v in function.__annotations__.items() if k not in (*own, "return")}
        holder = SimpleNamespace(__annotations__=texts)
        return get_type_hints(holder, function.__globals__, include_extras=True)

    def arguments_of(
        args: tuple[Any, ...], arguments: dict[str, Any]
    ) -> inspect.BoundArguments | None:
        try:
            bound = signature.bind(*args, **arguments)
        except TypeError:
            return None
        for name, value in bound.arguments.items():
            hint = hints().get(name, Any)
            if not _fits(value, hint):
                bound.arguments[name] = _as_python(value)
                if not _fits(bound.arguments[name], hint):
                    cure = advice.get(name) or f"give {_words(hint)}"
                    is_large = isinstance(value, int | float) and value > MAX_NUMBER
                    raise ConfigError(
                        f"{name}={shown(value)}: {'is not below 2**63; ' * is_large}{cure}"
                    )
        return bound

    return arguments_of


def _as_python(value: Any) -> Any:
    """Return numbers of other libraries as Python's, and lists as tuples."""
    if isinstance(value, bool | str | bytes):
        return value
    with suppress(Exception):  # lists within lists, and tensors of floats, which have `__index__`
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, list | tuple):
            return tuple(map(_as_python, value))
        if isinstance(value, dict):
            return {key: _as_python(item) for key, item in value.items()}
        return operator.index(value)
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Tell whether a value has the type and the bounds of an annotation."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if kind is Literal:
        return any(
            isinstance(value, type(argument)) and value == argument for argument in arguments
        )
    if kind is Annotated:
        return _is_within(value, *arguments)
    if kind in (int, float):
        return _is_within(value, kind, _INT)
    if kind in (None, NoneType):
        return value is None
    if kind is Callable:
        return callable(value)
    if kind is Any or not isinstance(kind, type):
        return True
    if getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False):
        return True
    return isinstance(value, kind) and _items_fit(value, kind, arguments)


def _is_within(value: Any, kind: Any, bounds: Within) -> bool:
    """Tell whether a number, or the length of a text, is within bounds. NaN never is."""
    if isinstance(value, bool) or not isinstance(value, int | float if kind is float else kind):
        return False
    size = len(value) if isinstance(value, str) else value
    return bool(bounds.least <= size <= bounds.most)


def _items_fit(value: Any, kind: type, arguments: tuple[Any, ...]) -> bool:
    """Tell whether the items of a list, tuple or mapping fit. Text is not a list of letters."""
    if isinstance(value, str | bytes):
        return kind in (str, bytes, object)
    if isinstance(value, Mapping) and len(arguments) == 2:
        return all(_fits(k, arguments[0]) and _fits(v, arguments[1]) for k, v in value.items())
    if not arguments or arguments[0] is Any or not isinstance(value, Collection):
        return True
    if kind is tuple and arguments[-1] is not ...:
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    with suppress(TypeError):  # a tensor may have no items
        return all(
            _fits(item, arguments[0]) for item in (value[:1] if type(value) is range else value)
        )
    return False


_WORDS: dict[Any, str] = {
    int: _INT.description,
    float: _FLOAT.description,
    str: "text",
    bool: "True or False",
    NoneType: "None",
    Callable: "a function",
    os.PathLike: "a path",
    np.ndarray: "an array",
    Any: "any value",
}


def _words(hint: Any) -> str:
    """Return what to give for an annotation."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType, Literal):
        *others, last = dict.fromkeys(_choices(hint))
        return f"{', '.join(others)} or {last}" if others else last
    if kind is Annotated:
        return str(arguments[1].description)
    if kind in _WORDS:
        return _WORDS[kind]
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return f"{{{_words(arguments[0])}: {_words(arguments[1])}}}" if arguments else "a dict"
    if isinstance(kind, type) and issubclass(kind, Collection) and arguments:
        items = list(map(_words, filter(lambda argument: argument is not ..., arguments)))
        return f"({', '.join(items)})" if len(items) > 1 else f"a list of {', '.join(items)}"
    package = getattr(kind, "__module__", "").partition(".")[0]
    return f"{'mm' if package == 'mmstream' else package}.{getattr(kind, '__name__', kind)}"


def _choices(hint: Any) -> list[str]:
    """Return the words of all that a union or a `Literal` allows."""
    if get_origin(hint) in (Union, UnionType):
        return [choice for part in get_args(hint) for choice in _choices(part)]
    return list(map(repr, get_args(hint))) if get_origin(hint) is Literal else [_words(hint)]


def shown(value: object) -> str:
    """Return a value as a message shows it: short, on one line.

    A URL that may hold a password or a signature is left out: one with a mark of them, or cut.
    """
    short = Repr()  # of lists within lists, too
    short.maxstring = short.maxother = 80
    text = escaped(short.repr(value))
    url = text.partition("://")[2]
    return type(value).__name__ if set("@:?") & set(url) or (url and "..." in text) else text


def refuse_broken(*rules: tuple[object, str]) -> None:
    """Raise a ConfigError with the message of the first rule across settings that is broken.

    Args:
        rules: Whether each is broken, and what to write.
    """
    for is_broken, message in rules:
        if is_broken:
            raise ConfigError(message)


def refuse_overridden(value: object, base: type, advice: str) -> None:
    """Refuse an object of a subclass with a `__call__` that a pipeline does not always call."""
    if type(value).__call__ is not base.__call__:
        raise ConfigError(
            f"{type(value).__name__} overrides {base.__name__}.__call__, which a pipeline does not "
            f"always call: override `decode`, or change the {advice} in transforms=(function,)"
        )


# -- what went away in this version; the next one empties this table ------------------------------

INSTEAD = {
    "mm.integrations": "use mm.model_inputs, and mmstream.train for trainers and flat batches",
    "mm.check_packing": "write `from mmstream.train import check_packing`",
    "mm.qwen_vl_length": "use mm.families.qwen_vl.image_length",
    "mm.qwen_vl_video_length": "use mm.families.qwen_vl.video_length",
    "mm.qwen3_vl_video_length": "use mm.families.qwen_vl.qwen3_video_length",
    "mm.qwen_omni_video_length": "use mm.families.qwen_omni.video_length",
    "mm.qwen3_omni_video_length": "use mm.families.qwen_omni.qwen3_video_length",
    "mm.qwen_audio_length": "use mm.families.qwen_audio.audio_length",
    "mm.qwen3_omni_audio_length": "use mm.families.qwen_omni.qwen3_audio_length",
    "mm.llava_next_length": "use mm.families.llava.next_image_length",
    "mm.llava_onevision_length": "use mm.families.llava.onevision_image_length",
    "mm.llava_onevision_video_length": "use mm.families.llava.onevision_video_length",
    "mm.internvl_length": "use mm.families.internvl.image_length",
    "mm.smolvlm_video_length": "use mm.families.idefics.smolvlm_video_length",
    "mm.LlavaNextTiles": "use mm.families.llava.LlavaNextTiles",
    "mm.LlavaOnevisionTiles": "use mm.families.llava.LlavaOnevisionTiles",
    "mm.InternVLTiles": "use mm.families.internvl.InternVLTiles",
    "mm.QwenVLPositions": "use mm.families.qwen_vl.QwenVLPositions",
    "mm.WhisperFeatures": "use mm.families.whisper.WhisperFeatures",
    "mm.Order.listed": "write order.refs(epoch, step) for each step",
    "mm.measure": "mm.plan(pipeline) measures and plans; measure_only=True gives lengths alone",
    "mm.plan_packs": "mm.plan(pipeline) measures and plans",
    "mmstream measure": "`mmstream plan URL --max-tokens T --pipeline module:object` measures and "
    "plans",
    "mmstream plan --measure": "it measures by itself; give --pipeline module:object",
    "mmstream reshard --measure": "a plan knows its lengths; leave it out",
    "reshard(measure=)": "a plan knows its lengths; leave it out",
    **{
        f"mm.{name}": f"write mm.errors.{name}"
        for name in (
            "BadSampleLimitError",
            "ChecksumError",
            "DecodeError",
            "LengthError",
            "ManifestError",
            "ShardError",
            "StorageError",
            "TimeoutError",
        )
    },
    **dict.fromkeys(
        ("mm.AudioShape", "mm.ImageShape", "mm.MediaShapes", "mm.MediaText", "mm.VideoShape"),
        "import it from mmstream.decoding.media_shapes",
    ),
    "mm.BakeReport": "mm.bake returns it; for annotations, import it from mmstream.baking.bake",
    "mm.ConvertReport": "mm.convert returns it; for annotations, import it from "
    "mmstream.converting.convert",
    "mm.Statistics": "mm.statistics returns it; for annotations, import it from "
    "mmstream.measuring.statistics",
    "mm.open_mixture": "write mm.Mixture.open(path)",
    **dict.fromkeys(
        ("mmstream show --shard", "mmstream show --index"), "write --find 'SHARD[INDEX]'"
    ),
    **{
        f"mm.Dataset.{name}": f"write dataset.shards.{name}"
        for name in (
            "accept",
            "assemble",
            "bounds",
            "checksum_error",
            "expect",
            "forget_index",
            "indexes",
            "known",
            "linked",
            "offsets",
            "parse",
            "read_bytes",
            "read_ranges",
            "read_unchecked",
            "url_of",
        )
    },
    "mm.Dataset.drop_cache": "write dataset.store.drop_cache(name, start, stop)",
    "mm.Dataset.load_indexes": "write dataset.shards.indexes.load(shards)",
    "mm.Dataset.index_of": "write dataset.shards.indexes.columns(shard)",
    "mm.Dataset.planned_bytes": "write dataset.corpus.num_bytes",
    "mm.bench": "run `mmstream bench URL --pipeline module:object`",
    "mmstream bench --ranks": "one rank is measured, with all rows; leave it out",
    "mmstream bench --cold": "empty the page cache by `sync; echo 1 | sudo tee "
    "/proc/sys/vm/drop_caches` before it",
    "mmstream bench --json": "read the lines; figures of your own come from loader.stats",
    **dict.fromkeys(
        (
            "mmstream info --pack-plan",
            "mmstream info --pipeline",
            "mmstream info --ranged-bytes",
            "mmstream info --ranged-requests",
            "mmstream info --cache-bytes",
            "mmstream info --reshuffle",
            "mmstream info --window-bytes",
            "mmstream info --weights-of",
            "mmstream info --ranks-per-node",
            "mmstream info --memory-bytes",
        ),
        "--plan G --ranks W says about what any run of that size asks of storage; "
        "loader.stats counts what a run asks",
    ),
    **dict.fromkeys(
        (
            "mmstream info --epochs",
            "mmstream info --mean-bytes",
            "mmstream info --samples-per-second",
            "mmstream info --request-price",
            "mmstream info --egress-price",
        ),
        "multiply the bytes and requests of an epoch that --plan G says",
    ),
    **{
        f"mmstream convert --{option}": f"in Python, give mm.convert {argument}"
        for option, argument in {
            "group-spans": "reading=mm.RowReading(group_spans=True)",
            "min-image-side": "media=mm.MediaOptions(min_image_side=)",
            "max-aspect": "media=mm.MediaOptions(max_aspect=)",
            "min-duration": "media=mm.MediaOptions(min_duration_s=)",
            "max-duration": "media=mm.MediaOptions(max_duration_s=)",
            "image-quality": "media=mm.MediaOptions(image_quality=)",
            "video-format": "media=mm.MediaOptions(video_format=)",
            "num-connections-per-host": "downloads=mm.DownloadOptions(num_connections_per_host=)",
            "download-timeout": "downloads=mm.DownloadOptions(timeout_s=)",
            "download-idle-timeout": "downloads=mm.DownloadOptions(idle_timeout_s=)",
            "download-tries": "downloads=mm.DownloadOptions(num_tries=)",
            "max-download-bytes": "downloads=mm.DownloadOptions(max_bytes=)",
            "max-redirects": "downloads=mm.DownloadOptions(max_redirects=)",
            "max-unanswered": "downloads=mm.DownloadOptions(max_unanswered=)",
            "near-duplicates": "duplicates=mm.Duplicates(near=), or `mmstream duplicates --near`",
            "no-sidecar": "sidecar=False",
        }.items()
    },
    "mmstream convert --sidecar": "sidecars are written by default; leave it out",
    "mmstream index --facts": "`mmstream plan` reads the shards; leave it out",
    "mmstream index --repack": "`mmstream convert TARS DEST` writes plain tars of gzipped ones",
    **dict.fromkeys(
        (
            "mmstream show --step",
            "mmstream show --epoch",
            "mmstream show --rank",
            "mmstream show --world-size",
            "mmstream show --global-batch-size",
            "mmstream show --state",
        ),
        "the page Order of `mmstream view URL --run FOLDER` has the samples of each step",
    ),
    **dict.fromkeys(
        ("mmstream show --bad", "mmstream show --quarantine"),
        "the page Problems of `mmstream view URL --run FOLDER` has these samples, and why",
    ),
    "mmstream show --image-size": "`mmstream view URL --pipeline module:object` has a page for "
    "each sample, as the model gets it",
    **dict.fromkeys(
        (
            "mmstream show --padding-free",
            "mmstream show --pack",
            "mmstream show --plan",
            "mmstream show --weights-of",
            "mmstream show --model",
        ),
        "mm.show(batch) in a notebook draws a batch without padding",
    ),
    **dict.fromkeys(
        (
            "mmstream train --tokenizer",
            "mmstream train --text-field",
            "mmstream train --padding-free",
            "mmstream train --pack",
            "mmstream train --plan",
            "mmstream train --weights-of",
            "mmstream train --bad-samples",
            "mmstream train --max-bad-fraction",
            "mmstream train --substitute-bad-shards",
            "mmstream train --reshuffle",
            "mmstream train --cache-dir",
            "mmstream train --max-cache-bytes",
        ),
        "give --pipeline module:object, whose mm.Pipeline has this setting",
    ),
    **dict.fromkeys(
        (
            "mmstream train --freeze",
            "mmstream train --compile",
            "mmstream train --attn-implementation",
            "mmstream train --micro-batch-tokens",
            "mmstream train --deterministic",
            "mmstream train --profile",
        ),
        "call mmstream.train.train(config, model=, pipeline=) with a model that you prepare",
    ),
    **dict.fromkeys(
        (
            "mmstream train --lr-schedule",
            "mmstream train --decay-steps",
            "mmstream train --final-lr-fraction",
            "mmstream train --weight-decay",
            "mmstream train --max-grad-norm",
            "mmstream train --keep-checkpoints",
        ),
        "change it in a copy of mmstream/train/loop.py",
    ),
    "mmstream train --validate-every": "--validation runs with each checkpoint: --checkpoint-every",
    "mmstream train --no-progress": "there is no progress bar any more; leave it out",
    "mmstream train --progress": "there is no progress bar any more; leave it out",
    **dict.fromkeys(
        (
            "TrainConfig(tokenizer=)",
            "TrainConfig(text_field=)",
            "TrainConfig(padding_free=)",
            "TrainConfig(pack=)",
            "TrainConfig(plan=)",
            "TrainConfig(weights_of=)",
            "TrainConfig(bad_samples=)",
            "TrainConfig(max_bad_fraction=)",
            "TrainConfig(substitute_bad_shards=)",
            "TrainConfig(reshuffle=)",
            "TrainConfig(cache_dir=)",
            "TrainConfig(max_cache_bytes=)",
        ),
        "call train(config, pipeline=) with a mm.Pipeline that has this setting",
    ),
    **dict.fromkeys(
        (
            "TrainConfig(freeze=)",
            "TrainConfig(compile=)",
            "TrainConfig(attn_implementation=)",
            "TrainConfig(micro_batch_tokens=)",
            "TrainConfig(deterministic=)",
            "TrainConfig(profile=)",
        ),
        "call train(config, model=, pipeline=) with a model that you prepare",
    ),
    **dict.fromkeys(
        (
            "TrainConfig(lr_schedule=)",
            "TrainConfig(decay_steps=)",
            "TrainConfig(final_lr_fraction=)",
            "TrainConfig(weight_decay=)",
            "TrainConfig(max_grad_norm=)",
            "TrainConfig(keep_checkpoints=)",
        ),
        "change it in a copy of mmstream/train/loop.py",
    ),
    "TrainConfig(validate_every=)": "validation= runs with each checkpoint: checkpoint_every=",
    "TrainConfig(progress=)": "there is no progress bar any more; leave it out",
    "ImageDecoder(device=)": "the CPU decodes; leave it out, and pass mm.to_device(loader, 'cuda')",
    "VideoDecoder(device=)": "the CPU decodes; leave it out, and pass mm.to_device(loader, 'cuda')",
    "to_device(decode_jpegs=)": "the loader's workers decode, on the CPU; leave it out",
    "to_device(decode_clip=)": "the loader's workers decode, on the CPU; leave it out",
}
"""What to write instead, by what went away, in one of four forms.

A command ("mmstream measure"), its option ("mmstream bench --quick"), a public name ("mm.measure"),
or an argument ("ImageDecoder(device=)").
"""


def instead_of(name: str) -> str | None:
    """Return one line: what is gone, and what to use instead. None: it is not in the table.

    Examples:
        >>> instead_of("to_device(decode_clip=)")
        "to_device(decode_clip=) is gone: the loader's workers decode, on the CPU; leave it out"
    """
    return f"{name} is gone: {INSTEAD[name]}" if name in INSTEAD else None


def arguments_gone(function: str) -> dict[str, str]:
    """Return what to write instead, by the names of the arguments that a function has lost."""
    start = f"{function}("
    return {
        name.removeprefix(start).removesuffix("=)"): advice
        for name, advice in INSTEAD.items()
        if name.startswith(start)
    }


def missing_attribute(owner: str, name: str, obj: object) -> AttributeError:
    """Return the error for an attribute that objects of a class do not have, or no longer have."""
    if reason := instead_of(f"mm.{owner}.{name}"):
        return AttributeError(reason)
    message = f"{owner!r} object has no attribute {name!r}"
    return AttributeError(message, name=name, obj=obj)  # Python suggests the nearest of its names
