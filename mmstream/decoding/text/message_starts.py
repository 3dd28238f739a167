"""Where a chat template writes each message, and what the model generates, from one rendering.

Place in the flow: `Chat` renders a copy of the template that writes a mark where a loop over the
messages begins a message, and where it ends. Blocks of ``{% generation %}`` are marked, too:

    {{ tools }}{% for m in messages %}[mark]{{ m.role }}: {{ m.content }}{% endfor %}[mark]{{ eos }}

A template cannot read what it has written. So the copy writes the same text otherwise, also where
it looks at the last or at the next message.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import jinja2
from jinja2 import nodes

MARK = "\ufdd0"
"""Begins a mark. Unicode keeps this character for such use inside a program."""

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Where a template begins what the model generates, for `transformers`."""

_BEGIN = re.compile(r"(\{%-?\s*)generation(\s*-?%\})")
_END = re.compile(r"(\{%-?\s*)endgeneration(\s*-?%\})")
_TAG = re.compile(r"(\{%[-+]?\s*(for|endfor)\b(?:[^%]|%(?!\}))*?)([-+]?%\})")
_FOUND = re.compile(rf"{MARK}(?:([<>])|(\d+):(?:(\d+):)?)")
_CAPTURES = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Block)
"""What may read the text that is written inside it."""


class MarkedText(NamedTuple):
    """A rendered conversation, and who wrote what."""

    text: str
    """Without marks."""
    segments: dict[int, list[tuple[int, int]]]
    """By number of a message: what was written while the template was at it, in order. None of them
    is empty."""
    end: int
    """Where the last loop over the messages ends."""
    generated: list[tuple[int, tuple[int, int]]]
    """What the template says that the model generates, in order, with the number of the message
    that it was at. -1: it was at none, or nobody knows."""


@lru_cache(maxsize=64)
def _parsed(source: str) -> nodes.Template | None:
    """Return the nodes of a chat template. None: it has tags that only transformers knows."""
    plain = _END.sub(r"\1endif\2", _BEGIN.sub(r"\1if true\2", source))
    try:
        return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except jinja2.TemplateSyntaxError:
        return None


@lru_cache(maxsize=64)
def marking_source(source: str) -> str:
    """Return a copy of a chat template that marks messages, and what the model generates.

    It marks no messages where no loop over the messages writes them, or where their text may be
    read again.
    """
    marking = _marking_messages(source) or source
    # A mark stands inside its block. Tags keep what they do to the white space beside them.
    begin = rf'\1generation %}}{{{{ "{MARK}<" }}}}{{% if false %}}{{% endif\2'
    end = rf'\1if false %}}{{% endif %}}{{{{ "{MARK}>" }}}}{{% endgeneration\2'
    return _END.sub(end, _BEGIN.sub(begin, marking))


def _marking_messages(source: str) -> str | None:
    tree = _parsed(source)
    if tree is None or MARK in source:
        return None
    loops = list(tree.find_all(nodes.For))
    marked = _message_loops(tree)
    tags = list(_TAG.finditer(source))
    if not marked or sum(tag[2] == "for" for tag in tags) != len(loops):
        return None
    pieces, copied, number = [], 0, 0
    opened: list[int] = []
    for tag in tags:
        if tag[2] == "for":
            opened.append(number)
            number += 1
        elif not opened:
            return None
        loop = opened[-1] if tag[2] == "for" else opened.pop()
        if not any(loops[loop] is node for node in marked):
            continue
        mark = f'"{MARK}{loop}:"'
        if tag[2] == "for":
            mark += ' ~ loop.revindex ~ ":"'
        # The white space around a tag depends on how it ends, so the last tag ends as this one did.
        again = f"{tag[1]}%}}{{{{ {mark} }}}}{{% if false %}}{{% endif {tag[3]}"
        pieces += [source[copied : tag.start()], again]
        copied = tag.end()
    return "".join([*pieces, source[copied:]])


def holds_mark(value: object) -> bool:
    """Tell whether a string of messages or tools holds what begins a mark."""
    return ascii(MARK)[1:-1] in repr(value)  # which writes this character as ascii() does


def split(rendered: str, num_messages: int) -> MarkedText:
    r"""Return a text without its marks, and who wrote what.

    Returns:
        No segments where the marks do not fit together: a message is written twice.

    Examples:
        >>> marked = split(f"<s>{MARK}0:2:user: hi\n{MARK}0:1:bot: ho\n{MARK}0:</s>", 2)
        >>> marked.text, marked.segments
        ('<s>user: hi\nbot: ho\n</s>', {0: [(3, 12)], 1: [(12, 20)]})
    """
    # A piece, the edge of what is generated, or the loop of a mark and its messages that are left.
    pieces = _FOUND.split(rendered)
    reader, fits = _Reader(), True
    edges: list[tuple[int, int]] = []
    for i in range(0, len(pieces) - 1, 4):
        piece, edge, loop, num_left = pieces[i : i + 4]
        if piece:
            reader.write(piece)
        if edge:
            edges.append((reader.stack[-1][1] if reader.stack else -1, reader.position))
        elif num_left is None:
            fits &= reader.leave(loop)
        else:
            fits &= reader.enter(loop, num_messages - int(num_left))
    text = "".join(pieces[::4])
    generated = [
        (number, (start, stop))
        for (number, start), (_, stop) in zip(edges[::2], edges[1::2], strict=True)
    ]
    if not fits or reader.stack or not reader.left:
        return MarkedText(text, {}, len(text), [(-1, span) for _, span in generated])
    return MarkedText(text, reader.segments, reader.end, generated)


class _Reader:
    """Follows a template through its loops over the messages."""

    def __init__(self) -> None:
        self.position = 0
        self.end = 0
        self.segments: dict[int, list[tuple[int, int]]] = {}
        self.stack: list[tuple[str, int]] = []
        """(loop, message) of the loops that the template is in, the innermost one last."""
        self.left: set[str] = set()
        """Outer loops that have ended."""
        self.written: set[int] = set()
        """Messages that an outer loop before this one has written."""

    def write(self, piece: str) -> None:
        start, self.position = self.position, self.position + len(piece)
        if self.stack:
            segments = self.segments.setdefault(self.stack[-1][1], [])
            if segments and segments[-1][1] == start:
                start = segments.pop()[0]
            segments.append((start, self.position))

    def enter(self, loop: str, number: int) -> bool:
        """Begin a message. False: it cannot begin here."""
        if self.stack and self.stack[-1][0] == loop:
            is_next = number == self.stack.pop()[1] + 1
        else:
            is_next = loop not in self.left
        self.stack.append((loop, number))
        return is_next and number >= 0 and number not in self.written

    def leave(self, loop: str) -> bool:
        """End a loop, which may have had no message. False: it cannot end here."""
        if self.stack and self.stack[-1][0] == loop:
            self.stack.pop()
        if not self.stack:
            if loop in self.left:
                return False
            self.left.add(loop)
            self.written = set(self.segments)
            self.end = self.position
        return True


def _message_loops(tree: nodes.Template) -> list[nodes.For]:
    """Return the loops over the messages that write something."""
    names = _message_names(tree)
    return [
        loop
        for loop in _plain_loops(tree)
        if not (loop.test or loop.recursive)
        and _is_messages(_counted(loop), names)
        and any(output for node in loop.body for output in _outputs(node))
    ]


def _message_names(tree: nodes.Template) -> set[str]:
    """Return the names that hold the messages, or all but the first ones."""
    assigned: dict[str, list[nodes.Node]] = {"messages": []}
    bound = Counter[str]()
    for node in _outside_macros(tree):
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            assigned.setdefault(node.target.name, []).append(node.node)
        if isinstance(node, nodes.Name) and node.ctx != "load":
            bound[node.name] += 1
    # What a loop, a `with` or a pair binds, is not followed.
    names = {name for name in assigned if bound[name] == len(assigned[name])}
    while True:  # a name is none of them where one of its values is not
        others = {
            name
            for name in names
            if not all(_is_messages(value, names) for value in assigned[name])
        }
        if not others:
            return names
        names -= others


def _is_messages(node: nodes.Node, names: set[str]) -> bool:
    """Tell whether an expression is the messages, or all but the first ones."""
    if isinstance(node, nodes.Name):
        return node.name in names
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Slice)
        and node.arg.stop is None
        and node.arg.step is None
        and _is_messages(node.node, names)
    )


def _counted(loop: nodes.For) -> nodes.Node:
    """Return X of a loop over ``range(X | length)`` that reads X, else what a loop is over."""
    node = loop.iter
    if (
        isinstance(node, nodes.Call)
        and isinstance(node.node, nodes.Name)
        and node.node.name == "range"
        and len(node.args) == 1
        and isinstance(node.args[0], nodes.Filter)
        and node.args[0].name in ("length", "count")
        and (counted := node.args[0].node) is not None
        and isinstance(loop.target, nodes.Name)
    ):
        read = [n for n in loop.find_all(nodes.Getitem) if loop.target.name in _names(n.arg)]
        return counted if all(item.node == counted for item in read) else node
    return node


def _outside_macros(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yield the nodes in a node whose names are those of the template itself."""
    for child in node.iter_child_nodes():
        if not isinstance(child, nodes.Macro):
            yield child
            yield from _outside_macros(child)


def _names(node: nodes.Node) -> set[str]:
    own = {node.name} if isinstance(node, nodes.Name) else set()
    return own | {name.name for name in node.find_all(nodes.Name)}


def _plain_loops(node: nodes.Node) -> Iterator[nodes.For]:
    """Yield the loops whose text nothing reads again."""
    for child in node.iter_child_nodes():
        if isinstance(child, _CAPTURES):
            continue
        if isinstance(child, nodes.For):
            yield child
        yield from _plain_loops(child)


def _outputs(node: nodes.Node) -> Iterator[nodes.Output]:
    if isinstance(node, nodes.Output):
        yield node
    yield from node.find_all(nodes.Output)
