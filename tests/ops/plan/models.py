"""Configs of models without weights, for tests of plans."""

from transformers import LlamaConfig


def llama(hidden: int, layers: int, heads: int, inter: int, kv_heads: int = 8) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inter,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


LLAMA_8B = llama(4096, 32, 32, 14336)
LLAMA_70B = llama(8192, 80, 64, 28672)
LLAMA_405B = llama(16384, 126, 128, 53248)
