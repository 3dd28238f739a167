"""What went away in this version is an error of one line that says what to use instead."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import mmstream as mm
from mmstream import settings, train
from mmstream.cli import cli


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mmstream guess", "mmstream info --guess", "mm.guess"):
        monkeypatch.setitem(settings.INSTEAD, name, "count instead")


@pytest.mark.parametrize("words", [["guess"], ["guess", "--help"], ["info", "--guess", "3", "x/"]])
@pytest.mark.usefixtures("table")
def test_a_command_or_option_that_is_gone_is_wrong_usage_with_what_to_use(words):
    name = "mmstream info --guess" if "info" in words else "mmstream guess"
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert done.output.splitlines()[-1] == f"Error: {name} is gone: count instead"


@pytest.mark.parametrize(("words", "hint"), [(["inform"], "info"), (["info", "--stat"], "--stats")])
def test_other_unknown_names_are_left_to_click(words, hint):
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert f"'{words[-1]}'" in done.output
    assert hint in done.output


@pytest.mark.usefixtures("table")
def test_a_public_name_that_is_gone_is_an_attribute_error_with_what_to_use():
    with pytest.raises(AttributeError, match=r"^mm\.guess is gone: count instead$"):
        mm.guess  # noqa: B018
    assert not hasattr(mm, "guess")


def test_what_the_table_names_is_not_there():
    for name in settings.INSTEAD:
        first, _, option = name.partition(" ")[-1].partition(" ")
        if name.startswith("mm."):
            assert name[3:] not in mm.__all__
        elif option:
            assert option not in [word for p in cli.commands[first].params for word in p.opts], name
        elif name.startswith("mmstream "):
            assert first not in cli.commands
        else:
            function, _, argument = name.removesuffix("=)").partition("(")
            with pytest.raises(mm.ConfigError, match=f"{function} has no {argument}=: "):
                getattr(train if hasattr(train, function) else mm, function)(**{argument: None})


def test_python_suggests_names_of_objects_that_have_others_gone() -> None:
    order = mm.Order.from_counts([4], global_batch_size=2)
    with pytest.raises(AttributeError, match="'Order' object has no attribute 'ref'") as caught:
        order.ref  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("ref", order)
