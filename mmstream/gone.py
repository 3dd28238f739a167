"""What went away in this version, and what to use instead. The next version empties this table.

Ground floor. Nothing but words lies here. The command line asks for commands and options, the
package for its public names, and `mmstream.wrong_arguments.checked` for arguments.
"""

from __future__ import annotations

INSTEAD = {
    "mm.integrations": "use mm.model_inputs, and mmstream.train for trainers and flat batches",
    "mm.check_packing": "write `from mmstream.train.check_packing import check_packing`",
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
    "mmstream.dataset.statistics",
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
            "change_since",
            "checksum_error",
            "drop_cache",
            "expect",
            "explain",
            "forget_index",
            "indexes",
            "known",
            "known_stat",
            "linked",
            "load_indexes",
            "map",
            "offsets",
            "parse",
            "read_bytes",
            "read_ranges",
            "read_unchecked",
            "url_of",
        )
    },
    "mm.Dataset.index_of": "write dataset.shards.indexes.columns(shard)",
    "mm.Dataset.planned_bytes": "write dataset.corpus.num_bytes",
    "mm.Dataset.ref_of_key": 'dataset[key]["__lineage__"] has the shard and the index',
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
            "facts": "facts=True, or run `mmstream index --facts`",
        }.items()
    },
    "mmstream convert --sidecar": "sidecars are written by default; leave it out",
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
        "`mmstream replay URL --state STATE --step N > FILE`, then --quarantine FILE",
    ),
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
