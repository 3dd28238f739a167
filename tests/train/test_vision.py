"""Images for models that take them in patches: Qwen-VL, with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmstream as mm
from mmstream._torchvision import import_torchvision
from mmstream.batching.split import split_rows
from mmstream.errors import ConfigError
from mmstream.train.vision import image_inputs
from mmstream.train.vlm import ConversationVlm, load_vlm
from tests.helpers.chats import QWEN_VL, SPECIAL, assistant, byte_chat, user

TOKENIZER = byte_chat(QWEN_VL, [token for token in SPECIAL if token != "<image>"])
SIZE = 56
TEXT = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
TOKENS = {
    f"{name}_token_id": TOKENIZER.convert_tokens_to_ids(token)
    for name, token in [
        ("image", "<|image_pad|>"),
        ("vision_start", "<|vision_start|>"),
        ("vision_end", "<|vision_end|>"),
        ("video", "</s>"),
    ]
}


def qwen(kind: str) -> Any:
    import_torchvision()
    import transformers

    sizes = {"out_hidden_size": 32, "intermediate_size": 32}
    more: dict[str, Any] = {
        "Qwen2VL": {"embed_dim": 32, "mlp_ratio": 1},
        "Qwen2_5_VL": {**sizes, "fullatt_block_indexes": [1]},
        "Qwen3VL": {**sizes, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    }
    text = TEXT | ({"head_dim": 16} if kind == "Qwen3VL" else {})
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=VISION | more[kind], **TOKENS
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def batch_of(counts: list[int], length: int) -> dict[str, Any]:
    decoder = mm.TextDecoder(TOKENIZER, image_token="<|image_pad|>", image_length=length)
    samples = []
    for row, count in enumerate(counts):
        fields = [f"{i}.jpg" for i in range(count)]
        parts = [{"type": "image", "field": field} for field in fields]
        messages = [user([*parts, {"type": "text", "text": "what?"}]), assistant(f"row {row}")]
        made = decoder({"json": {"messages": messages}, **dict.fromkeys(fields, b"")})
        images = list(torch.rand(count, 3, SIZE, SIZE, generator=torch.manual_seed(row)))
        samples.append({**made, "image": images})
    batch = mm.collate(samples)
    return {**batch, "__valid__": torch.ones(len(counts), dtype=torch.bool)}


def test_patches_are_those_of_the_models_own_processor() -> None:
    model = qwen("Qwen2_5_VL")
    from transformers import Qwen2VLImageProcessor

    processor = Qwen2VLImageProcessor(
        do_resize=False, do_rescale=False, do_normalize=False, patch_size=14
    )
    images = torch.rand(2, 3, SIZE, 2 * SIZE)[..., :SIZE]
    expected = processor(
        images=list(images), return_tensors="pt", input_data_format="channels_first"
    )
    inputs = image_inputs(model, images)
    assert inputs.keys() == expected.keys()
    for name, value in inputs.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_qwen_trains_alike_in_one_batch_and_in_parts(kind: str) -> None:
    model = ConversationVlm(qwen(kind), SIZE)
    assert model.image_length == 4
    assert all(p.requires_grad for p in model.parameters())
    batch = batch_of([2, 1, 0, 0], model.image_length)
    inputs = []
    for parts in ([batch], split_rows(batch, 2), split_rows(batch, 4)):
        model.zero_grad()
        losses = [model(part)[0] for part in parts]
        for loss in losses:
            loss.backward()
        last = [parameter.grad.clone() for parameter in model.parameters()]
        inputs.append((sum(losses).detach(), last))
    assert max(gradient.abs().max() for gradient in inputs[0][1]) > 1e-2
    for other in inputs[1:]:
        torch.testing.assert_close(other, inputs[0], rtol=1e-4, atol=1e-5)
    model.zero_grad()
    model(split_rows(batch, 2)[1])[0].backward()  # no image
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_folder_of_qwen_is_loaded_with_the_size_it_is_asked_for(tmp_path: Any) -> None:
    qwen("Qwen2_5_VL").save_pretrained(tmp_path)
    assert load_vlm(str(tmp_path), tokenizer=TOKENIZER, image_size=SIZE).image_length == 4
    assert load_vlm(str(tmp_path)).image_size == 16 * 28
    with pytest.raises(ConfigError, match="image_size is 50; it must be a multiple of 28"):
        load_vlm(str(tmp_path), image_size=50)
