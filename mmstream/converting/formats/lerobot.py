"""An episode of LeRobot. Part of step 2 of a conversion.

`rows.lerobot` makes the rows. The sample has a video for each camera, an array for each feature of
numbers, and the texts of the tasks:

    observation.images.top.mp4  observation.state.npy  action.npy  timestamp.npy  txt  json

A camera whose frames are pictures in the tables has a member for each of them:

    observation.images.top.000000.png  observation.images.top.000001.png
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from mmstream.converting.draft import Draft, FrameSpan, MediaRef, RowError
from mmstream.converting.formats.drafts import make_draft
from mmstream.errors import escaped

__all__ = ["MAX_FPS", "MEMBER_STEM", "Episode", "EpisodeVideo", "episode", "is_episode"]

MAX_FPS = 1e6
"""Above the rate of any camera, and far from where times overflow."""

MAX_PICTURES = 16_000
"""Most pictures of an episode, of all cameras together. A sample has at most 16,384 members."""

MEMBER_STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
"""Names of features that may be names of members of a tar."""

_EXTENSION = re.compile(r"[a-z0-9]{2,5}")
_KEYS = {"codebase_version", "episode_index", "videos", "members"}


class EpisodeVideo(msgspec.Struct):
    """The video of one camera."""

    path: str
    """Relative to the data set."""
    start_s: Annotated[float, msgspec.Meta(ge=0)] | None
    """Time of the episode's first frame in the file. None: the file has nothing but the episode."""


class Episode(msgspec.Struct):
    """The row of an episode."""

    id: int
    codebase_version: str
    robot_type: str | None
    episode_index: int
    length: Annotated[int, msgspec.Meta(ge=1)]
    """Number of frames."""
    fps: Annotated[float, msgspec.Meta(gt=0, le=MAX_FPS)]
    tasks: list[str]
    names: dict[str, Any]
    """{feature: names of its dimensions}, as the data set has them."""
    videos: dict[str, EpisodeVideo]
    """{camera: its video}."""
    members: dict[str, bytes]
    """Further members of the tar: npy [T, ...] for numbers, a list of T texts for texts."""
    pictures: dict[str, bytes] = {}
    """{member of the tar: a frame}, for cameras whose frames lie in the tables."""


def is_episode(row: dict[str, Any]) -> bool:
    """Tell whether a row is one that `rows.lerobot` has made."""
    return row.keys() >= _KEYS


def episode(row: dict[str, Any]) -> Draft:
    """Return the draft of an episode.

    Raises:
        RowError: Anybody else has made the row, or a function of the caller has changed it.
    """
    try:
        content = msgspec.convert(row, Episode)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RowError(f"no row of an episode: {escaped(error, 200)}") from None
    fields = [f"{camera}.mp4" for camera in content.videos]
    _require_members([*fields, *content.members, *content.pictures])
    if len(content.pictures) > MAX_PICTURES:
        raise RowError(
            f"{len(content.pictures):,} pictures, the limit of an episode is {MAX_PICTURES:,}; "
            "make videos of them with lerobot's convert_image_to_video_dataset"
        )
    refs = [
        MediaRef(
            "video",
            video.path,
            field=field,
            frames=FrameSpan(video.start_s, content.length, content.fps),
        )
        for field, video in zip(fields, content.videos.values(), strict=True)
    ]
    texts = tuple(content.tasks)
    draft = make_draft(
        row,
        {"captions": list(texts)} if texts else {},
        refs,
        {"tasks", "members", "pictures"},
        kept=tuple(Episode.__struct_fields__),
        texts=texts,
        fields=content.members,
    )
    pictures = (
        MediaRef("image", name, data, field=name) for name, data in content.pictures.items()
    )
    return msgspec.structs.replace(draft, media=(*draft.media, *pictures))


def _require_members(names: list[str]) -> None:
    """Refuse names that a tar cannot hold side by side. It is read in lower case."""
    for name in names:
        stem, _, extension = name.rpartition(".")
        if not MEMBER_STEM.fullmatch(stem) or not _EXTENSION.fullmatch(extension):
            raise RowError(f"no row of an episode: the member {escaped(name, 100)!r}")
    if len({name.lower() for name in names}) < len(names):
        raise RowError("no row of an episode: two members of one name")
