"""Whether a server refuses that its media are used for training. No input or output.

download (headers of an answer) -> ROBOTS

The directives are those that img2dataset honours, plus the reservation of TDMRep.
"""

from __future__ import annotations

from collections.abc import Iterable

TOKEN = "mmstream"
"""What ``X-Robots-Tag: mmstream: noai`` is addressed to."""

DIRECTIVES = ("noai", "noimageai", "noindex", "noimageindex")


def disallowed_by(robots_tags: Iterable[str], tdm_reservation: str | None = None) -> str | None:
    """Return the directive that forbids the use of a medium. None: there is none.

    Args:
        robots_tags: Every ``X-Robots-Tag`` of an answer. A directive may stand behind the name of
            the program that it is for: ``otherbot: noai, noindex``.
        tdm_reservation: ``TDM-Reservation`` of the answer (W3C TDMRep). ``1`` reserves the rights
            of text and data mining.

    Examples:
        >>> disallowed_by(["noarchive, NoAI"]), disallowed_by(["otherbot: noai"])
        ('noai', None)
    """
    for tag in robots_tags:
        program = TOKEN
        for text in tag.lower().split(","):
            name, colon, directive = text.rpartition(":")
            # "unavailable_after: 25 Jun 2030 15:00:00 PST" is a directive with a value.
            if colon and "unavailable_after" not in name:
                program = name.strip()
            if program == TOKEN and directive.strip() in DIRECTIVES:
                return directive.strip()
    if tdm_reservation is not None and tdm_reservation.strip() == "1":
        return "tdm-reservation"
    return None
