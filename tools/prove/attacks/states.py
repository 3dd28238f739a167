"""Attacks by saved states. Every one must be a StateError."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mmstream as mm
from tests.helpers.corpora import write_corpus
from tools.prove.attacks.attack import Attack

HUGE = 10**30


def _load(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Load a state of mid-epoch that was changed, both ways that a loader has for it."""

    def run(folder: Path) -> None:
        write_corpus(folder, [12, 8])
        pipeline = mm.Pipeline(mm.open_dataset(folder), global_batch_size=4)
        errors = []
        for on_change in ("refuse", "finish_epoch"):
            loader = mm.Loader(pipeline, on_change=cast(Any, on_change))
            next(iter(loader))
            state = json.loads(json.dumps(loader.state_dict()))
            del state["crc32c"]  # who changes a state can leave it out
            changed = change(state)
            try:
                loader.load_state_dict(changed)
            except mm.StateError as error:
                errors.append(error)
        assert len(errors) == 2, f"accepted {2 - len(errors)} times"
        raise errors[0]

    return run


def _order(**values: Any) -> Callable[[Path], None]:
    return _load(lambda state: {**state, "order": {**state["order"], **values}})


def _state(**values: Any) -> Callable[[Path], None]:
    return _load(lambda state: {**state, **values})


def _replaced(content: object) -> Callable[[Path], None]:
    return _load(lambda _state: content)


def _without(name: str) -> Callable[[Path], None]:
    return _load(lambda state: {k: v for k, v in state.items() if k != name})


def _deep() -> object:
    value: object = 0
    for _ in range(50_000):
        value = [value]
    return value


CONTENTS: tuple[object, ...] = (None, [], "state", 7, {}, {"version": 1})

ATTACKS = (
    *(Attack(f"state: {content!r}", _replaced(content), ".") for content in CONTENTS),
    *(
        Attack(f"state: without {name}", _without(name), ".")
        for name in ("version", "epoch", "step", "order")
    ),
    *(
        Attack(
            f"state: {name} {value!r}",
            _state(**{name: value}),
            ".",
        )
        for name, value in (
            ("version", True),
            ("version", "1"),
            ("version", 2),
            ("epoch", -1),
            ("epoch", True),
            ("epoch", HUGE),
            ("epoch", 1.0),
            ("step", -1),
            ("step", HUGE),
            ("step", "3"),
            ("step", float("nan")),
            ("order", None),
            ("order", []),
            ("order", {}),
        )
    ),
    *(
        Attack(f"state: order.{name} {str(value)[:40]!r}", _order(**{name: value}), ".")
        for name, value in (
            ("version", True),
            ("version", 99),
            ("corpus", 5),
            ("corpus", "0" * 32),
            ("num_shards", HUGE),
            ("num_shards", -1),
            ("num_shards", True),
            ("bad", [1]),
            ("global_batch_size", HUGE),
            ("global_batch_size", 0),
            ("global_batch_size", "4"),
            ("seed", "x"),
            ("seed", None),
            ("grid", [10**9, 4]),
            ("grid", [0, 0]),
            ("grid", 4),
            ("grid", [1]),
            ("window", HUGE),
            ("window", -1),
            ("window", True),
            ("interleave", HUGE),
            ("chunk", HUGE),
            ("chunk", 0),
            ("shuffle", "yes"),
            ("drop_last", "yes"),
            ("sizes", 5),
            ("sha256", [1]),
            ("seed", "\x1b[2J\n"),
            ("sources", {"a": {}}),
        )
    ),
    Attack("state: nested 50,000 times", _load(lambda state: {**state, "order": _deep()}), "."),
)
