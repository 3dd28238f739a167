"""Pages and cells of notebooks: jinja2 templates that escape every value, and one stylesheet.

    samples.py, packs.py, statistics.py -> html.py -> templates/

The data may come from strangers. Autoescaping is always on, long values are cut, and characters
that nobody would see are shown by their numbers. The HTML refers to no other file and to no network
address.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from mmstream.display.text import count_text, size_text
from mmstream.errors import escaped

MAX_CHARACTERS = 400
"""Longest value in a page, where a template does not say another length."""

_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters but for tab and line ends, and those that embed or override a direction."""


def cut(value: object, max_characters: int = MAX_CHARACTERS) -> Markup:
    """Return a value as escaped text of some length. Bytes are read as UTF-8, HTML stays as it is.

    Control characters, and those that would change the direction of the text after them, are shown
    by their numbers.
    """
    if isinstance(value, Markup):
        return value
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    num_left_out = len(text) - max_characters
    if num_left_out > 0:
        text = f"{text[:max_characters]} ... {num_left_out:,} more"
    text = _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return escape(text.encode("utf-8", "replace").decode())


def environment(*folders: Path) -> jinja2.Environment:
    """Return the templates of folders and those of ``templates/``. They escape all values."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, Path(__file__).with_name("templates")]),
        autoescape=True,
        finalize=cut,  # of whatever is printed
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"cut": cut, "size": size_text, "count": count_text}
    return templates


_TEMPLATES = environment()

_ELEMENTS = _TEMPLATES.get_template("elements.html").module


def element(name: str, *values: Any) -> Markup:
    """Return the HTML of a macro of ``elements.html``, such as ``element("table", rows)``."""
    return Markup(getattr(_ELEMENTS, name)(*values))


def render(template: str, **values: Any) -> Markup:
    """Return the HTML of a template."""
    return Markup(_TEMPLATES.get_template(template).render(values))


def page(*sections: Markup) -> str:
    """Return the output of a notebook cell, with the stylesheet and the parts below each other."""
    return str(render("page.html", sections=sections))


def document(title: str, *pages: str) -> str:
    """Return a whole page that needs no other file.

    Its content security policy forbids every script, and forbids the browser to load anything.

    Args:
        title: Text of the title, not yet escaped.
        pages: The body, as `page` returns it.
    """
    return str(render("document.html", title=escaped(title), pages=map(Markup, pages)))
