"""Flax models of Hugging Face at tiny sizes with random weights, and which of their modules go where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import transformers as hf

VOCAB, LENGTH, ROWS, WIDTH = 32, 8, 4, 16


@dataclass(frozen=True)
class Case:
    """A model as its library makes it, a batch for it, and where its scopes go.

    Attributes:
      model: makes the unmodified model.
      batch: keyword arguments of a call, arrays of ROWS rows.
      scopes: (pattern for `register_task`, device), in order.
      mutable: whether it keeps running statistics beside its parameters.
    """

    model: Callable[[], Any]
    batch: Callable[[], dict[str, Any]]
    scopes: tuple[tuple[str, int], ...]
    mutable: bool = False


def _tokens() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    mask = np.ones((ROWS, LENGTH), np.int32)
    mask[0, -2:] = 0
    return {"input_ids": jnp.asarray(rng.integers(0, VOCAB, (ROWS, LENGTH))), "attention_mask": jnp.asarray(mask)}


def _pair() -> dict[str, Any]:
    return {**_tokens(), "decoder_input_ids": _tokens()["input_ids"][:, ::-1]}


def _image() -> dict[str, Any]:
    return {"pixel_values": jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, 3, 16, 16)), jnp.float32)}


def _gpt2() -> Any:
    config = hf.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=2)
    return hf.FlaxGPT2LMHeadModel(config, input_shape=(1, LENGTH), seed=0)


def _gpt_neo() -> Any:
    config = hf.GPTNeoConfig(
        vocab_size=VOCAB, max_position_embeddings=LENGTH, hidden_size=WIDTH, num_layers=2, num_heads=2,
        attention_types=[[["global", "local"], 1]], window_size=4,
    )  # fmt: skip
    return hf.FlaxGPTNeoForCausalLM(config, input_shape=(1, LENGTH), seed=0)


def _decoder(key_heads: int) -> dict[str, int]:
    """Positions are more than a head is wide: the models cut their table of angles by the wrong one of the two."""
    return dict(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=key_heads, max_position_embeddings=32,
    )  # fmt: skip


def _llama() -> Any:
    return hf.FlaxLlamaForCausalLM(hf.LlamaConfig(**_decoder(2)), input_shape=(1, LENGTH), seed=0)


def _mistral() -> Any:
    return hf.FlaxMistralForCausalLM(hf.MistralConfig(**_decoder(1)), input_shape=(1, LENGTH), seed=0)


def _bert() -> Any:
    config = hf.BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    return hf.FlaxBertForMaskedLM(config, input_shape=(1, LENGTH), seed=0)


def _bart() -> Any:
    config = hf.BartConfig(
        vocab_size=VOCAB, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=LENGTH,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    return hf.FlaxBartForConditionalGeneration(config, input_shape=(1, LENGTH), seed=0)


def _vit() -> Any:
    config = hf.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16,
        patch_size=8, num_labels=4,
    )  # fmt: skip
    return hf.FlaxViTForImageClassification(config, seed=0)


def _resnet() -> Any:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4)
    return hf.FlaxResNetForImageClassification(config, input_shape=(1, 16, 16, 3), seed=0)


# Blocks are called "0" and "1"; so are other things in some models, which a path of scopes would tell apart.
_BLOCKS = (("0", 0), ("1", 1))

CASES: dict[str, Case] = {
    "gpt2": Case(_gpt2, _tokens, _BLOCKS),
    "gpt_neo": Case(_gpt_neo, _tokens, _BLOCKS),
    "llama": Case(_llama, _tokens, _BLOCKS),
    "mistral": Case(_mistral, _tokens, _BLOCKS),
    "bert": Case(_bert, _tokens, _BLOCKS),
    "bart": Case(_bart, _pair, (("encoder", 0), ("decoder", 1))),
    "vit": Case(_vit, _image, _BLOCKS),
    "resnet": Case(_resnet, _image, (("embedder", 0), ("encoder", 1)), mutable=True),
}
