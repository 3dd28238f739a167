"""Where each message begins in a rendered conversation, from one rendering of it.

Place in the flow: `Chat` locates answers by what is rendered before them. That takes a rendering
for each answer, unless the template is a plain loop over the messages:

    {{ tools }}{% for m in messages %}[mark]{{ m.role }}: {{ m.content }}{% endfor %}{{ prompt }}

A message then leaves the same text whatever follows it. So a copy of the template, which writes a
mark before each message, tells where all of them begin. Its syntax tree shows whether a template is
such a loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import jinja2
from jinja2 import nodes

__all__ = ["MarkingTemplate", "marking_template"]

MARK = "\ufdd0\ufdd1"
"""Written before each message. Unicode keeps these characters for such use inside a program."""

_LOOP = re.compile(r"(\{%[-+]?\s*for\s+\w+\s+in\s+messages\s*)([-+]?%\})")
_LOOKS_BACK = frozenset({"first", "index", "index0"})
"""What a template may ask its loop. Everything else may depend on the messages that follow."""


@dataclass(frozen=True)
class MarkingTemplate:
    """A chat template that writes `MARK` before each message.

    Attributes:
        source: The template that it was made of.
        template: Itself. It writes the same text otherwise.
    """

    source: str
    template: str

    @staticmethod
    def split(rendered: str, num_messages: int) -> tuple[str, list[int]] | None:
        r"""Return a text without its marks, and where each message begins.

        Returns:
            None where there is not one mark a message: a message holds one, or the loop has ended.

        Examples:
            >>> MarkingTemplate.split(f"{MARK}user: hi\n{MARK}assistant: ho\n", 2)
            ('user: hi\nassistant: ho\n', [0, 9])
        """
        pieces = rendered.split(MARK)
        if len(pieces) != num_messages + 1:
            return None
        return "".join(pieces), list(accumulate(map(len, pieces[:-1])))


def marking_template(source: object) -> MarkingTemplate | None:
    """Return a copy of a chat template that marks messages.

    Args:
        source: The template.

    Returns:
        None where what a message leaves in the text may depend on those that follow it.
    """
    if not isinstance(source, str) or len(_LOOP.findall(source)) != 1:
        return None
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except jinja2.TemplateSyntaxError:  # tags that only transformers knows
        return None
    if not _is_plain_loop(tree):
        return None
    # The white space around a tag depends on how it ends, so the last tag ends as the loop's did.
    marked = rf'\1%}}{{{{ "{MARK}" }}}}{{% if false %}}{{% endif \2'
    return MarkingTemplate(source, _LOOP.sub(marked, source))


def _is_plain_loop(tree: nodes.Template) -> bool:
    """Tell whether a template writes messages one after another, without looking ahead."""
    loops = [node for node in tree.body if isinstance(node, nodes.For) and _is_messages(node.iter)]
    if len(loops) != 1:
        return False
    loop = loops[0]
    position = tree.body.index(loop)
    firsts = sum(
        _is_messages(node.node) and isinstance(node.arg, nodes.Const) and node.arg.value == 0
        for node in tree.find_all(nodes.Getitem)
    )
    names_of_loop = _own_loop_names(loop.body)
    looks_back = sum(
        isinstance(node.node, nodes.Name)
        and node.node in names_of_loop
        and node.attr in _LOOKS_BACK
        for node in loop.find_all(nodes.Getattr)
    )
    return (
        not (loop.test or loop.else_ or loop.recursive)
        and _names(tree.body).count("messages") == 1 + firsts
        and len(names_of_loop) == looks_back
        and "add_generation_prompt" not in _names(tree.body[: position + 1])
        and {*_names(tree.body[position + 1 :])} <= {"add_generation_prompt"}
        and not any(tree.find_all((nodes.Block, nodes.Extends, nodes.Include, nodes.ImportedName)))
        and not any(tree.find_all((nodes.Import, nodes.FromImport)))
    )


def _is_messages(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "messages" and node.ctx == "load"


def _names(body: Sequence[nodes.Node]) -> list[str]:
    """Return the names that nodes read or write, each as often as they do."""
    names = [node.name for node in body if isinstance(node, nodes.Name)]
    return names + [name.name for node in body for name in node.find_all(nodes.Name)]


def _own_loop_names(body: Sequence[nodes.Node]) -> list[nodes.Name]:
    """Return where the body of a loop names its ``loop``. Loops inside it have their own."""
    return [name for node in body for name in _loop_names(node)]


def _loop_names(node: nodes.Node) -> Iterator[nodes.Name]:
    if isinstance(node, nodes.Name) and node.name == "loop":
        yield node
    inner = node.body if isinstance(node, nodes.For) else []
    for child in node.iter_child_nodes():
        if not any(child is each for each in inner):
            yield from _loop_names(child)
