"""`processor_collate`: batches as a processor of transformers makes them, for any model.

Place in the flow: `Pipeline(collate=)` takes it, and gets the decoders that it needs from it:

    sample -> decoders at the stored size; the chat template writes the text (`ProcessorText`)
           -> `ProcessorCollate` gives all rows of the batch to the processor, and adds labels

A processor makes a batch at once, so it cannot tell which row is bad. Where it fails, the pipeline
decodes the step again, and each row goes through the processor alone. What fails alone is bad.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch

from mmstream.batching.collate import as_list, collate
from mmstream.decoding.decode import Decode
from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.decoding.media_shapes import MediaShapes
from mmstream.decoding.text.chat import probe_chat
from mmstream.decoding.text.decoder import DecodedText, Prompt, TextDecoder
from mmstream.decoding.text.placeholders import Placeholder, Placeholders, media_parts
from mmstream.errors import ConfigError, DecodeError, MMStreamError, SampleError, escaped
from mmstream.families.family import import_torchvision
from mmstream.media.fields import FIELDS_OF, field_names, value_at
from mmstream.settings import PositiveInt, checked, refuse_broken
from mmstream.types import IGNORED_LABEL, Batch, Sample

Text: TypeAlias = str | Callable[[dict[str, Any]], str | list[dict[str, Any]]] | Literal[False]

PROMPT = "__prompt__"
"""The field of a decoded sample with its text for the processor."""

_ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}
_PARTS = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}
_DECODERS = {
    "image": "image=mm.ImageDecoder()",
    "video": "video=mm.VideoDecoder(fps=2)",
    "audio": "audio=mm.AudioDecoder()",
}


@dataclass(frozen=True, eq=False)
class ProcessorText(TextDecoder):
    """Writes the text of a sample, and leaves the tokens to a processor.

    Attributes:
        owner: The class of the processor, for messages.
        kinds: The kinds of media that it takes.
        media_tokens: By kind: what stands for a medium in a text for the processor.
    """

    owner: str = ""
    kinds: tuple[str, ...] = ()
    media_tokens: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens = {kind: token for kind, (token, _) in self._lengths.items()} | dict(
            self.media_tokens
        )
        chat, kinds = None, self.kinds or ("image",)
        if getattr(self.tokenizer, "chat_template", None):
            written = {kind: tokens[kind] for kind in kinds}
            chat = probe_chat(self.tokenizer, written, kinds, self.today)
        counted = {
            kind: Placeholder(kind, token, 0, 1)
            for kind, token in self.media_tokens.items()
            if chat is None or not chat.takes_parts or self._writes(kind, token)
        }
        placeholders = Placeholders(tuple(counted.values()), self.max_length) if counted else None
        media = media_parts(self.tokenizer, tokens, action=self.undecoded_parts, counted=counted)
        self.__dict__.update(_chat=chat, _core=None, _placeholders=placeholders, _media=media)

    @cached_property
    def counted_media(self) -> frozenset[str]:
        """The kinds of media of which a text shows each by a token."""
        kinds = () if self._placeholders is None else self._placeholders.kinds
        return frozenset(placeholder.kind for placeholder in kinds)

    @property
    def has_template(self) -> bool:
        """Whether it can write conversations."""
        return self._chat is not None

    def _writes(self, kind: str, token: str) -> bool:
        """Tell whether the chat template writes one token for a medium."""
        content = [{"type": kind}, {"type": "text", "text": "?"}]
        conversation = [{"role": "user", "content": content}]
        try:
            text = self.tokenizer.apply_chat_template(conversation, tokenize=False)
        except Exception:  # a template may raise anything
            return False
        return str(text).count(token) == 1

    def _prompts(
        self, sample: dict[str, Any], media: Collection[str], shapes: MediaShapes | None
    ) -> list[Prompt]:
        refuse_undecoded(self.owner, self.kinds, media, sample)
        row = sample.get("json")
        if not self.has_template and not self.field and isinstance(row, dict) and "messages" in row:
            raise ConfigError(
                f"{self.owner} has no chat template, and the samples have messages: set "
                "processor.chat_template, or pass text=, a field or a function from the sample to "
                "a string"
            )
        try:
            return super()._prompts(sample, media, shapes)
        except DecodeError as error:
            advice = str(error).replace("TextDecoder(field=", "processor_collate(text=")
            raise DecodeError(advice) from None

    def _prompt(
        self,
        value: str | list[Any],
        sample: dict[str, Any],
        media: Collection[str],
        shapes: MediaShapes | None,
    ) -> Prompt:
        """Return a text. Processors without a chat template put media before a caption."""
        tokens = self.media_tokens.values()
        if isinstance(value, str) and not (self._chat or any(token in value for token in tokens)):
            return Prompt(value, None, 0)
        return super()._prompt(value, sample, media, shapes)

    def _finish_all(self, prompts: Sequence[Prompt]) -> list[DecodedText | SampleError]:
        return [DecodedText({PROMPT: prompt}, 0, prompt.num_dropped_parts) for prompt in prompts]


def refuse_undecoded(
    owner: str, kinds: Sequence[str], decoded: Collection[str], sample: Iterable[str]
) -> None:
    """Refuse a sample with media that the processor takes and nothing decodes, or with others only.

    Raises:
        ConfigError: Says what to pass.
    """
    fields = {kind: names for kind, of in FIELDS_OF.items() if (names := of(sample))}
    for kind in kinds:
        if kind in fields and kind not in decoded:
            raise ConfigError(
                f"{owner} takes {kind}s, and nothing decodes {field_names(fields[kind])}: pass "
                f"Pipeline(decode=mm.Decode({_DECODERS[kind]})) with all decoders that it needs"
            )
    if kinds and fields and not fields.keys() & set(kinds):
        others = field_names(name for of_kind in fields.values() for name in of_kind)
        raise ConfigError(
            f"{owner} takes {' and '.join(kinds)}, and the samples have {others}: pass the "
            "processor of a model for these, or leave the fields out with Pipeline(before=)"
        )


@dataclass(frozen=True, eq=False)
class ProcessorCollate:
    """Makes batches with a processor; see `processor_collate`, which makes it."""

    processor: Any
    text: Text | None = None
    max_length: int | None = None
    padding: str = "longest"
    labels: bool = True
    fields: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = field(init=False)
    """The kinds of media that the processor takes."""
    decoder: ProcessorText | None = field(init=False)
    """Writes the texts. None: there are none."""

    def __post_init__(self) -> None:
        kinds = _kinds_of(self.processor)
        if not kinds and getattr(self.processor, "tokenizer", None) is None:
            raise ConfigError(
                f"processor_collate: {self.name} is not a processor: pass "
                "AutoProcessor.from_pretrained(name); for text alone, mm.Decode(text=) needs none"
            )
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "decoder", None if self.text is False else self._text_decoder())

    def __reduce__(self) -> tuple[Any, ...]:
        settings = (self.text, self.max_length, self.padding, self.labels, self.fields)
        return _loaded, (pickle.dumps((self.processor, *settings, self.options)),)

    @property
    def name(self) -> str:
        """The class of the processor."""
        return type(self.processor).__name__

    @property
    def sampling_rate(self) -> int | None:
        """Samples of sound per second that the processor takes. None: it takes no sound."""
        rate = getattr(_part(self.processor, "audio"), "sampling_rate", None)
        return None if rate is None else int(rate)

    def decode(self, decode: Decode | None) -> Decode:
        """Return the decoders of a pipeline, with those that it was not given.

        Raises:
            ConfigError: They tokenize, cut pictures or resample sound otherwise.
        """
        if decode is None:
            own: dict[str, Any] = {}
            if "image" in self.kinds:
                own["image"] = ImageDecoder()
            if "audio" in self.kinds:
                from mmstream.decoding.audio import AudioDecoder  # FFmpeg is slow to import

                own["audio"] = AudioDecoder(sample_rate=self.sampling_rate)
            decode = Decode(**own)
        if isinstance(decode.text, ProcessorText):  # of a copied pipeline
            return decode
        sounds = [decode.audio, getattr(decode.video, "audio", None)]
        refuse_broken(
            (
                decode.is_baked or decode.text is not None,
                f"processor_collate: {self.name} tokenizes the texts itself: leave out "
                "Decode(text=), and say where a text is by processor_collate(text=)",
            ),
            (
                decode.image is not None and decode.image.tiles is not None,
                f"processor_collate: {self.name} cuts pictures into tiles itself: leave out "
                "ImageDecoder(tiles=)",
            ),
            (
                "audio" in self.kinds
                and any(
                    sound is not None
                    and (sound.sample_rate != self.sampling_rate or sound.features is not None)
                    for sound in sounds
                ),
                f"processor_collate: {self.name} makes its features of {self.sampling_rate} Hz: "
                f"write mm.AudioDecoder(sample_rate={self.sampling_rate})",
            ),
        )
        return replace(decode, text=self.decoder)

    def alone(self, sample: Sample) -> Sample:
        """Return the same sample, if the processor takes it alone.

        Raises:
            SampleError: It does not.
        """
        self([sample])
        return sample

    def __call__(self, samples: list[Sample]) -> Batch:
        """Return the batch of decoded samples.

        Raises:
            SampleError: The processor refuses them, or one of them.
        """
        if self.decoder is None:
            for sample in samples:
                refuse_undecoded(self.name, self.kinds, (), sample)
        prompts = [sample[PROMPT] for sample in samples if PROMPT in sample]
        if self.decoder is not None and len(prompts) < len(samples):
            raise ConfigError(
                "processor_collate: pass its result itself, Pipeline(collate=), which prepares the "
                "texts; for more fields, processor_collate(fields=)"
            )
        own = [{name: value_at(sample, name) for name in self.fields} for sample in samples]
        try:
            batch = self._made(prompts, self._media(samples), _video_metadata(samples))
            return batch | collate(own)
        except MMStreamError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {escaped(' '.join(str(error).split()), 400)}"
            raise SampleError(f"{self.name}: {reason}") from error

    def _text_decoder(self) -> ProcessorText:
        processor = self.processor
        tokenizer: Any = getattr(processor, "tokenizer", None)
        refuse_broken(
            (
                tokenizer is None,
                f"processor_collate: {self.name} has no tokenizer: pass text=False for its media "
                "alone, or a whole processor, AutoProcessor.from_pretrained(name)",
            ),
            (
                "text" not in _parameters(processor) and not _is_open(processor),
                f"processor_collate: {self.name} takes no text: pass text=False, and make labels "
                "of a text in Pipeline(transforms=)",
            ),
        )
        template = getattr(processor, "chat_template", None)
        if template is not None:
            tokenizer = copy(tokenizer)
            tokenizer.chat_template = template
        tokens = {kind: getattr(processor, f"{kind}_token", None) for kind in self.kinds}
        return ProcessorText(
            tokenizer,
            field=self.text or None,
            max_length=self.max_length or 512,
            owner=self.name,
            kinds=self.kinds,
            media_tokens={kind: token for kind, token in tokens.items() if isinstance(token, str)},
        )

    def _media(self, samples: Sequence[Sample]) -> dict[str, list[list[Any]]]:
        """Return the media of each row, by kind. Kinds that no row has are left out."""
        media = {}
        for kind in self.kinds:
            rows = [list(as_list(sample.get(kind))) for sample in samples]
            if not any(rows):
                continue
            for row in rows:
                if not self._is_placed(kind) and len(row) != 1:
                    raise SampleError(f"{self.name} takes one {kind} a row, and it has {len(row)}")
            media[kind] = rows
        return media

    def _is_placed(self, kind: str) -> bool:
        """Tell whether media stand in a text, so that a row has any number."""
        return isinstance(getattr(self.processor, f"{kind}_token", None), str)

    def _made(
        self,
        prompts: Sequence[Prompt],
        media: Mapping[str, list[list[Any]]],
        metadata: list[list[dict[str, Any]]],
    ) -> Batch:
        """Call the processor.

        Args:
            prompts: The texts, one of each row, or none.
            media: The media of each row, by kind.
            metadata: What processors ask of the videos of each row.
        """
        arguments: dict[str, Any] = {"return_tensors": "pt", **self.options}
        pictures = [[_pillow(image) for image in row] for row in media.get("image", ())]
        if pictures:
            is_nested = self._is_placed("image")
            arguments["images"] = pictures if is_nested else [row[0] for row in pictures]
        if "audio" in media:
            arguments["audio"] = [sound.numpy() for row in media["audio"] for sound in row]
            arguments["sampling_rate"] = self.sampling_rate
            if _default(_part(self.processor, "audio"), "padding") is False:
                arguments.setdefault("audio_kwargs", {"padding": True})
        if "video" in media:
            arguments["videos"] = media["video"]
            arguments["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": metadata}
        texts = [prompt.text for prompt in prompts]
        tokens = self._text_settings(texts) if texts else {}
        if _is_open(self.processor):
            return self._in_parts(arguments, texts, tokens)
        has_labels = self.labels and self.decoder is not None and self.decoder.has_template
        if texts and "padding" in _parameters(self.processor):
            arguments = {"text": texts, **tokens, **arguments}
        elif texts:
            arguments["text"] = texts
            arguments["text_kwargs"] = tokens | arguments.get("text_kwargs", {})
        if has_labels:
            arguments["text_kwargs"] |= {"return_offsets_mapping": True}
            arguments["return_text_replacement_offsets"] = True
        batch = dict(self.processor(**arguments))
        if texts and "labels" in batch and "input_ids" not in batch:  # with padding among them
            tokenized = self.processor.tokenizer(texts, return_tensors="pt", **tokens)
            batch["labels"] = _without_padding(tokenized)
        return self._with_labels(batch, prompts) if has_labels else batch

    def _in_parts(self, arguments: dict[str, Any], texts: list[str], tokens: Any) -> Batch:
        """Return what the parts of a processor make that cannot be told how to pad texts.

        Such are those of speech to text: the text is what is learned.
        """
        batch: Batch = {}
        options = {name: value for name, value in arguments.items() if name not in _GIVEN}
        for kind, name in _ARGUMENTS.items():
            if name in arguments:
                own = options
                if kind == "audio":
                    own = {"sampling_rate": self.sampling_rate, **arguments.get("audio_kwargs", {})}
                    own |= options
                batch |= _part(self.processor, kind)(arguments[name], **own)
        if texts:
            tokenized = self.processor.tokenizer(texts, return_tensors="pt", **tokens)
            makes_sound = hasattr(self.processor, "_decode_audio")  # of a text, which is read
            batch |= tokenized if makes_sound else {"labels": _without_padding(tokenized)}
        return batch

    def _text_settings(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return how texts are tokenized, by the rules of ``processor.apply_chat_template``."""
        settings: dict[str, Any] = {"padding": self.padding}
        if self.max_length is not None:
            settings |= {"truncation": True, "max_length": self.max_length}
        bos = self.processor.tokenizer.bos_token
        assert self.decoder is not None
        if self.decoder.has_template and bos is not None and texts[0].startswith(bos):
            settings["add_special_tokens"] = False
        return settings

    def _with_labels(self, batch: Batch, prompts: Sequence[Prompt]) -> Batch:
        """Return a batch with the ids of answers as labels, and of plain text all but media's."""
        offsets = batch.pop("offset_mapping", None)
        replaced = batch.pop("text_replacement_offsets", None)
        if offsets is None or replaced is None:
            raise ConfigError(
                f"processor_collate: {self.name} does not tell which tokens are of an answer: pass "
                "labels=False, and make labels of its input_ids"
            )
        ids, is_token = batch["input_ids"], batch["attention_mask"] != 0
        weights = torch.zeros(ids.shape)
        for row, prompt in enumerate(prompts):
            own = list(replaced[row]) if row < len(replaced) else []
            starts, stops = offsets[row].unbind(-1)
            spans = prompt.spans if prompt.spans is not None else [(0, len(prompt.text))]
            for (start, stop), weight in zip(
                spans, prompt.weights or [1.0] * len(spans), strict=True
            ):
                is_in = (starts < _moved(stop, own)) & (stops > _moved(start, own))
                if prompt.spans is None:  # the special tokens around plain text count, too
                    is_in.fill_(True)
                weights[row].masked_fill_(is_in & is_token[row], weight)
            for change in own:
                start, stop = change["new_span"]
                weights[row].masked_fill_((starts < stop) & (stops > start), 0)
            if not weights[row, 1:].any():
                raise SampleError(
                    f"no token of it is trained: it has no answer, or max_length="
                    f"{self.max_length} leaves none; labels=False delivers it all the same"
                )
        batch["labels"] = torch.where(weights > 0, ids, IGNORED_LABEL)
        if any(prompt.weights for prompt in prompts):
            batch["label_weights"] = weights
        return batch


_GIVEN = ("images", "videos", "videos_kwargs", "audio", "audio_kwargs", "sampling_rate")


@checked(
    {
        "text": 'give the name of a field, a path such as "json.caption", a function from the '
        "sample, or False"
    }
)
def processor_collate(
    processor: Any,
    *,
    text: Text | None = None,
    max_length: PositiveInt | None = None,
    padding: Literal["longest", "max_length"] = "longest",
    labels: bool = True,
    fields: tuple[str, ...] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> ProcessorCollate:
    """Return a collate function that makes batches with any processor of transformers.

    Its pipeline needs no ``decode=``: pictures and sound are decoded at their stored size. Videos
    need ``decode=mm.Decode(video=...)``, with the frames to take.

    Args:
        processor: Of `AutoProcessor`, or an image processor or feature extractor alone.
        text: Where the text of a sample is, as `TextDecoder.field`: a field, a path into JSON, or a
            function from the sample to a string or messages. None: messages, else ``txt``. False:
            there is none.
        max_length: The most tokens of a text. A longer one loses its end; if that has media, the
            sample is bad. None: no limit.
        padding: What texts are padded to: "longest", the longest of the batch, or "max_length".
        labels: Whether a processor with a chat template also gives ``labels``: the ids of answers,
            or those of plain text, and -100 elsewhere. A sample without any is bad.
        fields: More fields of a sample for the batch, as `collate` joins them, such as "cls".
        options: More arguments of the processor.

    Returns:
        A function for ``Pipeline(collate=)``, which can be pickled. A batch has what the processor
        returns as tensors of torch, ``labels``, int64 [B, T], and ``label_weights``, float32
        [B, T], where messages have weights. Speech to text gets the text as ``labels``.

    Raises:
        ConfigError: The processor has no tokenizer, and `text` is not False; or it takes nothing.

    Examples:
        >>> from transformers import ViTImageProcessor
        >>> collate = mm.processor_collate(ViTImageProcessor(), text=False)
        >>> pipeline = mm.Pipeline(mm.open_dataset("shards/"), global_batch_size=8, collate=collate)
        >>> batch = next(iter(mm.Loader(pipeline)))
        >>> tuple(batch["pixel_values"].shape)
        (8, 3, 224, 224)
    """
    options = dict(options)
    return ProcessorCollate(processor, text, max_length, padding, labels, fields, options)


def _loaded(settings: bytes) -> ProcessorCollate:
    """Return what was pickled, also where no processor was imported before: in a worker."""
    with suppress(ImportError):
        import_torchvision()
    return ProcessorCollate(*pickle.loads(settings))


def _part(processor: Any, kind: str) -> Any:
    """Return the part of a processor that takes a kind of media, or itself. None: it has none."""
    part = getattr(processor, _PARTS[kind], None)
    if part is None and kind == "audio":
        part = getattr(processor, "audio_processor", None)
    if part is None and not hasattr(processor, "tokenizer"):
        part = processor
    return part if kind != "audio" or hasattr(part, "sampling_rate") else None


def _parameters(processor: Any) -> Mapping[str, Any]:
    return inspect.signature(type(processor).__call__).parameters


def _default(part: Any, name: str) -> Any:
    """Return what an argument of a part of a processor is where it is not given."""
    parameter = _parameters(part).get(name)
    return None if parameter is None else parameter.default


def _is_open(processor: Any) -> bool:
    """Tell whether its call has no arguments by name: speech to text, or a part of a processor."""
    names = _parameters(processor).keys()
    return "text" not in names and not names.isdisjoint(("args", "raw_speech"))


def _kinds_of(processor: Any) -> tuple[str, ...]:
    """Return the kinds of media that a processor takes, by its parts and the names of arguments."""
    names, is_open = _parameters(processor), _is_open(processor)
    wanted = {
        "image": ("images",),
        "video": ("videos",),
        "audio": ("audio", "raw_speech"),
    }
    return tuple(
        kind
        for kind, of_kind in wanted.items()
        if _part(processor, kind) is not None
        and (not names.keys().isdisjoint(of_kind) or (is_open and kind == "audio"))
    )


def _pillow(image: torch.Tensor) -> Any:
    """Return a picture, uint8 [3, H, W], as Pillow's, which every processor takes."""
    from PIL import Image

    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def _video_metadata(samples: Sequence[Sample]) -> list[list[dict[str, Any]]]:
    """Return the rate and the times of the frames of each row's videos, as processors take them.

    Frames are numbered in units of their rate: number / rate is the time in the file.
    """
    return [
        [
            {"total_num_frames": len(times), "fps": rate, "frames_indices": (times * rate).tolist()}
            for times, rate in zip(
                as_list(sample.get("video_pts_s")), sample.get("video_fps", ()), strict=True
            )
        ]
        for sample in samples
    ]


def _moved(position: int, replaced: Sequence[Mapping[str, Any]]) -> int:
    """Return where a character of a text stands, after media have taken the place of tokens.

    For example, with ``<image>`` at (2, 9) that became (2, 30), character 12 is 33.
    """
    ends = [(change["span"][1], change["new_span"][1]) for change in replaced]
    old, new = max((end for end in ends if end[0] <= position), default=(0, 0))
    return int(position - old + new)


def _without_padding(tokens: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, IGNORED_LABEL)
