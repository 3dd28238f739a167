"""TRL's trainers on a loader: the losses of the plain Trainer, and those of TRL's own data."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import mmstream as mm
from mmstream.train import LoaderTrainer, LoaderTrainerMixin, preference_inputs
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.families import transformers
from tests.helpers.packs import llama

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL warns of its own affairs

TOKENIZER = byte_tokenizer(chat=True)
ROLES = ("user", "assistant")
SETTINGS: dict[str, Any] = {
    "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1,
    "save_strategy": "no", "max_steps": 2, "learning_rate": 0.1, "bf16": False,
}  # fmt: skip


def mixed(name: str) -> Any:
    """The two lines of the docs."""
    trl: Any = importlib.import_module("trl")
    return type(f"My{name}", (LoaderTrainerMixin, getattr(trl, name)), {})


def config(name: str, folder: Any, **more: Any) -> Any:
    trl: Any = importlib.import_module("trl")
    return getattr(trl, name)(str(folder / "out"), **{**SETTINGS, **more})


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("trl") / "chats"
    texts = [("?" * n, "!" * n * n) for n in range(1, 13)]
    rows = [
        {
            "messages": [
                {"role": role, "content": text} for role, text in zip(ROLES, pair, strict=True)
            ]
        }
        for pair in texts
    ]
    mm.convert(rows, folder, progress=False)
    return str(folder)


def chat_loader(chats: str, batching: Any) -> mm.Loader:
    text = mm.TextDecoder(TOKENIZER, max_length=256)
    dataset = mm.open_dataset(chats)
    decode = mm.Decode(text=text)
    pipeline = mm.Pipeline(dataset, global_batch_size=2, decode=decode, batching=batching)
    if isinstance(batching, mm.Pack):
        mm.plan(pipeline, num_workers=0, progress=False)
    return mm.Loader(pipeline)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batching", "takes_count"), [(None, True), (mm.Flat(), False), (mm.Pack(256), True)]
)
def test_sft_has_the_losses_of_the_plain_trainer(
    chats: str, tmp_path: Any, batching: Any, takes_count: bool
) -> None:
    found = []
    for trainer_type, arguments_type in (
        (LoaderTrainer, transformers.TrainingArguments),
        (mixed("SFTTrainer"), importlib.import_module("trl").SFTConfig),
    ):
        model = llama(vocab_size=len(TOKENIZER))
        model.accepts_loss_kwargs = takes_count  # Qwen-VL does not
        settings = {**SETTINGS, "gradient_accumulation_steps": 2, "gradient_checkpointing": False}
        arguments = arguments_type(str(tmp_path / "out"), **settings)
        trainer = trainer_type(
            model, arguments, train_dataset=chat_loader(chats, batching),
            eval_dataset={"a": chat_loader(chats, batching)}, processing_class=TOKENIZER,
        )  # fmt: skip
        found.append([*losses(trainer), trainer.evaluate()["eval_a_loss"]])
        weights = torch.cat([value.detach().flatten() for value in model.parameters()])
        found[-1] += [weights.norm().item()]
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("is_of_trl", [False, True])
def test_a_resume_loads_the_weights_of_a_model_with_other_names_in_its_files(
    chats: str, tmp_path: Any, is_of_trl: bool
) -> None:
    """transformers saves Qwen2-VL under the names of older versions, and does not load these."""
    shared = importlib.import_module("shared")
    processor = transformers.Qwen2VLProcessor(
        shared.PROCESSOR, TOKENIZER, transformers.Qwen2VLVideoProcessor()
    )
    trainer_type = mixed("SFTTrainer") if is_of_trl else LoaderTrainer
    arguments = importlib.import_module("trl").SFTConfig if is_of_trl else None
    arguments = arguments or transformers.TrainingArguments

    def run(**settings: Any) -> list[Any]:
        settings = {**SETTINGS, "learning_rate": 0.01, "save_strategy": "steps", **settings}
        trainer = trainer_type(
            shared.make_model(), arguments(str(tmp_path / "out"), **settings),
            train_dataset=chat_loader(chats, mm.Flat()), processing_class=processor,
        )  # fmt: skip
        trainer.train("auto")
        return list(trainer.model.parameters())

    whole = run(save_steps=1)
    for file in tmp_path.glob("out/checkpoint-2/*"):
        file.unlink()
    for resumed, expected in zip(run(save_steps=9), whole, strict=True):
        torch.testing.assert_close(resumed, expected)


PAIRS = [
    {
        "prompt": [{"role": "user", "content": "What is it?" * n}],
        "chosen": [{"role": "assistant", "content": "A cat." * n}],
        "rejected": [{"role": "assistant", "content": "A dog"}],
    }
    for n in (1, 3, 2, 4)
]


# TRL counts what the template writes after the end mark to the answer. Here that is nothing.
PAIR_TOKENIZER = byte_tokenizer(chat=True)
PAIR_TOKENIZER.chat_template = PAIR_TOKENIZER.chat_template.replace("<|im_end|>\n", "<|im_end|>")


def pair_loader(folder: Any, **settings: Any) -> mm.Loader:
    mm.convert(PAIRS, folder / "pairs", progress=False)
    decode = mm.Decode(text=mm.TextDecoder(PAIR_TOKENIZER, texts="all"))
    settings = {"global_batch_size": 2, "batching": mm.Flat(), "decode": decode, **settings}
    return mm.Loader(mm.Pipeline(mm.open_dataset(folder / "pairs"), shuffle=False, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DPO", "Reward"])
def test_preferences_are_the_inputs_that_trl_makes_of_its_own_data(
    name: str, tmp_path: Any
) -> None:
    models = {
        "DPO": lambda: llama(vocab_size=len(TOKENIZER)),
        "Reward": lambda: transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(
                vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=64, num_labels=1,
                num_hidden_layers=1, num_attention_heads=2,
            )
        ),
    }  # fmt: skip
    arguments = config(f"{name}Config", tmp_path)
    reference = {"ref_model": models[name]()} if name == "DPO" else {}
    common = {"args": arguments, "processing_class": PAIR_TOKENIZER, **reference}
    rows = importlib.import_module("datasets").Dataset.from_list(PAIRS)
    parent: Any = getattr(importlib.import_module("trl"), f"{name}Trainer")
    theirs = parent(model=models[name](), train_dataset=rows, **common)
    loader = pair_loader(tmp_path)
    trainer = mixed(f"{name}Trainer")(
        model=models[name](), train_dataset=loader, eval_dataset=loader, **common
    )
    inputs = list(trainer.get_train_dataloader())
    assert len(inputs) == 2
    for number, own in enumerate(inputs):
        rows_of_step = [theirs.train_dataset[2 * number], theirs.train_dataset[2 * number + 1]]
        expected = theirs.data_collator(rows_of_step)
        assert own.keys() == expected.keys()
        for field, values in expected.items():
            assert own[field].tolist() == values.tolist(), field
    assert len(losses(trainer)) == 2
    assert trainer.evaluate(loader)["eval_loss"] > 0


def test_what_does_not_fit_is_said(chats: str, tmp_path: Any) -> None:
    loader = chat_loader(chats, None)

    def make(name: str, **settings: Any) -> None:
        arguments = config(f"{name}Config", tmp_path, **settings)
        mixed(f"{name}Trainer")(
            model=llama(vocab_size=len(TOKENIZER)), args=arguments, train_dataset=loader,
            processing_class=TOKENIZER,
        )  # fmt: skip

    for name in ("packing", "assistant_only_loss", "padding_free"):
        with pytest.raises(mm.ConfigError, match=rf"SFTConfig\({name}=True\): a loader's pipeline"):
            make("SFT", **{name: True})
    with pytest.raises(mm.ConfigError, match=r"MyKTOTrainer: pass data_collator="):
        make("KTO")
    batch = next(iter(loader))
    with pytest.raises(mm.ConfigError, match=r"batching=mm\.Flat"):
        preference_inputs(batch, 0)
    with pytest.raises(mm.ConfigError, match="no two texts"):
        preference_inputs(next(iter(chat_loader(chats, mm.Flat()))), 0)


def test_rows_that_only_fill_a_step_are_left_out(tmp_path: Any) -> None:
    loader = pair_loader(tmp_path, global_batch_size=3, drop_last=False)
    whole, rest = (preference_inputs(batch, 0) for batch in loader)
    assert (len(whole["input_ids"]), len(rest["input_ids"])) == (6, 2)
    batch = {**list(loader)[1], "__valid__": torch.zeros(3, dtype=torch.bool)}
    pair = preference_inputs(batch, 0)
    assert pair["input_ids"][0].tolist() == pair["input_ids"][1].tolist()
    assert not pair["completion_mask"].any()
