"""Makes a tiny model with random weights, which the real engine serves on the CPU. Run it with the engine's Python.

    PYTHON tools/tiny_model.py FOLDER [--arch llama|gemma3|deepseek] [--layers 2] [--dtype bfloat16] [--seed 0]

llama has one KV group. gemma3 has two: layers that see a window of 64 tokens, and layers that see everything. deepseek
has multi-head latent attention (MLA): one vector of 576 numbers a token and layer instead of keys and values.

The weights are not drawn as for training. Small weights make attention nearly even over all tokens and leave the answer
to the last few; here attention is sharp and its part in the answer large, so that a greedy answer depends on the whole
prompt, and a wrong page restored to the KV cache changes it. The tokenizer has a token for each byte, so text and
tokens tell the same.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
MAX_TOKENS = 2048


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 259 tokens: three special ones (ids 0 to 2), then one for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS.values(), *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_TOKENS, **SPECIAL_TOKENS)


def model_config(arch: str, layers: int, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """The model's shape: hidden size 64, 4 heads, 2 KV heads, head dimension 32."""
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if arch == "llama":
        return LlamaConfig(**common)
    if arch == "deepseek":
        return DeepseekV2Config(
            **common | {"num_key_value_heads": 4, "head_dim": 64},
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            first_k_dense_replace=layers,  # no layer has experts
            n_routed_experts=4,
            num_experts_per_tok=2,
        )
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3TextConfig(
        **common,
        sliding_window=64,
        layer_types=[kinds[layer % 2] for layer in range(layers)],
        query_pre_attn_scalar=1,  # scores are divided by its root: with a usual value attention is even again
    )


def random_model(config: PreTrainedConfig, dtype: torch.dtype, seed: int) -> torch.nn.Module:
    """A model of this shape; the same seed gives the same weights."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                continue  # norms stay as they are
            if "embed_tokens" in name:
                scale = 0.5 / getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)  # Gemma scales them up
            else:
                scale = (3.0 if "self_attn" in name else 1.5) * weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return model


def main() -> None:
    """Reads the command line and writes the model's folder."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", choices=["llama", "gemma3", "deepseek"], default="llama")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    tokenizer = byte_tokenizer()
    config = model_config(options.arch, options.layers, tokenizer)
    random_model(config, getattr(torch, options.dtype), options.seed).save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    print(options.folder)


if __name__ == "__main__":
    main()
