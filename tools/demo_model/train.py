"""Trains the demo model on the tasks of the demo corpus; a CPU is enough.

    python -m tools.demo_model.train --minutes 90 --threads 1 --out DIR [--resume DIR]

The things that mattered, in this order:

1. Findings are labelled, and copied token for token, in document and summary: induction suffices.
2. Copying must pay from the start. Random sequences repeated many times, and reports whose names and numbers are
   replaced by random tokens (the same in document and summary), cannot be guessed, only copied. Without them copying
   did not appear in 5M tokens, and words of a kind that the model had learned to guess first (`Office`, `Council`)
   shared nearly one embedding (cosine 0.98) and were not copied right after 25M tokens. Moving them apart
   (`--spread-embeddings`) and making them unguessable took exact lines from a quarter to all of them in 8M tokens.
3. Short documents dense with findings first, long ones later. Positions jump at random by up to thousands, so that
   short documents also teach long distances.
4. Stochastic depth over sublayers, rising with depth. It gives a small model the tolerance to skipped sublayers that
   large models have by themselves: mention this wherever the acceptance of its drafts is quoted. `--max-drop 0` trains
   without it, as `demo-plain` was.
5. A fast step: logits only where there is loss, compiled sublayers, and attention in chunks of queries, which on CPU
   took 0.6 (256 tokens) and 0.3 (512) of the fused kernel's time, forward and backward.

Times are CPU times, so that a run that is paused or shares its cores still does all its work.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from rayspec.demo.corpus import WORDS
from rayspec.demo.tasks import DOMAINS, Task, generate_task
from tools.demo_model.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

_TOKENS_PER_STEP = 4096
_LONGEST = {"ledger": 2048, "schedule": 1024}  # most tokens of a task of these domains; others have no limit
_UNITS_PER_TOKEN = 1 / 10
_GUESSED_DOMAIN = "schedule"  # its answer does not follow from its prompt word by word
_QUERIES_PER_CHUNK = 128
_DOCUMENT_LOSS_SHARE = 0.08
_DOCUMENT_LOSS_WEIGHT = 0.25
_FIRST_SEED = 2**40  # tasks of smaller seeds are held out
_MAX_CHUNKED_LENGTH = 1024
_FIRST_PLAIN_ID = 6  # ids below are special tokens
# each stage: progress at its end, share of repetitions, lengths to choose from
_CURRICULUM = (
    (0.15, 0.25, (256, 256, 512)),
    (0.50, 0.12, (256, 512, 512, 1024)),
    (1.00, 0.06, (256, 512, 512, 1024, 1024, 2048, 2048, 4096)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Training sequences, padded on the right, and the tokens that are targets of the loss."""

    ids: Tensor  # [batch, length]
    positions: Tensor  # [batch, length]
    rows: Tensor  # [targets], indices into batch * length: the token before each target
    targets: Tensor  # [targets]
    weights: Tensor  # [targets]
    answered: Tensor  # [targets], bool: a token of an answer


class TaskBatches:
    """Batches of tasks with their answers, drawn without end from one seed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._vocab_size = len(tokenizer)
        self._name_ids = _name_ids(tokenizer)

    def tasks(self, length: int) -> Batch:
        """Make a batch of tasks that fit `length` tokens with their answers. Half of the tasks, except schedules, get
        random tokens as names."""
        shape = (_TOKENS_PER_STEP // length, length)
        ids, weights = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
        answered = torch.zeros(shape, dtype=torch.bool)
        for row in range(len(ids)):
            domain = self._rng.choice([one for one in DOMAINS if length <= _LONGEST.get(one, length)])
            prompt, answer = self._fitting(domain, length)
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            answered[row, len(prompt) : end] = True
            if domain != _GUESSED_DOMAIN and self._rng.random() < 0.5:
                ids[row] = self._random_names()[ids[row]]
            elif domain not in _LONGEST:
                chosen = torch.rand(len(prompt), generator=self._generator) < _DOCUMENT_LOSS_SHARE
                weights[row, 1 : len(prompt)] = _DOCUMENT_LOSS_WEIGHT * chosen[1:]
        weights[answered] = 1.0
        return _batch(ids, self._positions(ids), weights, answered)

    def repetitions(self) -> Batch:
        """Make a batch of short random sequences that repeat; all tokens after the first period are targets."""
        length = 256
        period = self._rng.choice((7, 12, 23, 41, 90))
        shape = (_TOKENS_PER_STEP // length, period)
        once = torch.randint(_FIRST_PLAIN_ID, self._vocab_size, shape, generator=self._generator)
        ids = once.repeat(1, length // period + 1)[:, :length]
        answered = torch.zeros(ids.shape, dtype=torch.bool)
        answered[:, period + 1 :] = True
        return _batch(ids, self._positions(ids), answered.float(), answered)

    def _fitting(self, domain: str, length: int) -> tuple[list[int], list[int]]:
        """Return the ids of a task's prompt and of its answer, together at most `length`."""
        size = length * _UNITS_PER_TOKEN * self._rng.uniform(0.7, 1.0)
        while True:
            task = generate_task(domain, _FIRST_SEED + self._rng.getrandbits(40), size=max(2, int(size)))
            prompt, answer = self._ids(task)
            if len(prompt) + len(answer) <= length:
                return prompt, answer
            size *= 0.97 * length / (len(prompt) + len(answer))

    def _ids(self, task: Task) -> tuple[list[int], list[int]]:
        prompt, answer = self._tokenizer([task.prompt, f"{task.answer}<|eos|>"]).input_ids
        return prompt, answer

    def _random_names(self) -> Tensor:
        """Return a map of ids [vocabulary]: names become random tokens that are not special; other ids stay."""
        plain = torch.randperm(self._vocab_size - _FIRST_PLAIN_ID, generator=self._generator) + _FIRST_PLAIN_ID
        mapped = torch.arange(self._vocab_size)
        mapped[self._name_ids] = plain[: len(self._name_ids)]
        return mapped

    def _positions(self, ids: Tensor) -> Tensor:
        """Return positions [batch, length] that jump ahead at a few tokens: short documents teach long distances."""
        batch, length = ids.shape
        jumps = torch.rand(batch, length, generator=self._generator) < 4 / length
        reach = 2.0 ** (torch.rand(batch, 1, generator=self._generator) * 11)
        sizes = torch.rand(batch, length, generator=self._generator) * reach
        return torch.arange(length) + (jumps * sizes).long().cumsum(1)


class DepthDroppingForward:
    """A Llama model's forward up to its final norm, skipping each sublayer at random during training."""

    def __init__(self, model: LlamaForCausalLM, seed: int) -> None:
        self._decoder = model.model
        self._rng = random.Random(seed)
        self._attend: Callable[..., Tensor] = torch.compile(_attend, dynamic=False)
        self._transform: Callable[..., Tensor] = torch.compile(_transform, dynamic=False)

    def __call__(self, ids: Tensor, positions: Tensor, max_drop: float) -> Tensor:
        """Return hidden states [batch, length, hidden] of ids [batch, length]. The probability that a sublayer is
        skipped grows from 0 for the first towards `max_drop` for the last."""
        hidden = self._decoder.embed_tokens(ids)
        cos, sin = self._decoder.rotary_emb(hidden, positions)
        num_sublayers = 2 * len(self._decoder.layers)
        for index, layer in enumerate(self._decoder.layers):
            if self._rng.random() >= max_drop * (2 * index) / num_sublayers:
                hidden = self._attend(layer, hidden, cos, sin)
            if self._rng.random() >= max_drop * (2 * index + 1) / num_sublayers:
                hidden = self._transform(layer, hidden)
        return self._decoder.norm(hidden)  # type: ignore[no-any-return]


def new_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Make the demo model, untrained: 16 layers, 3.3M parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cpu_seconds: float,
    peak_lr: float,
    max_drop: float,
    resumed: bool,
    seed: int,
    save: Callable[[LlamaForCausalLM], None],
    save_every_s: float = 240.0,
) -> None:
    """Train `model` (float32, in place). Call `save` with averaged weights every `save_every_s` seconds and at the end.

    max_drop: the probability that the last sublayer is skipped in a step; earlier ones are skipped less often.
    """
    AttentionInterface.register("chunked_training", chunked_attention)
    model.set_attn_implementation("chunked_training")
    model.train()
    forward = DepthDroppingForward(model, seed)
    optimizer = torch.optim.AdamW(_parameter_groups(model), lr=peak_lr, betas=(0.9, 0.98), fused=True)
    average = copy.deepcopy(model)
    batches, rng = TaskBatches(tokenizer, seed), random.Random(seed)
    start = saved = time.process_time()
    step, accuracy = 0, 0.0
    while (progress := (time.process_time() - start) / cpu_seconds) < 1:
        batch = _next_batch(batches, rng, max(progress, 0.15) if resumed else progress)
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * _lr_factor(step, progress)
        loss, hit_rate = _backward(model, forward, batch, max_drop if resumed or progress > 0.35 else 0.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _average_into(average, model, decay=min(0.99, step / (step + 10)))
        accuracy += 0.05 * (hit_rate - accuracy)
        if step % 20 == 0:
            minutes = (time.process_time() - start) / 60
            logger.info(
                "%.1f CPU min, step %d, length %d, loss %.3f, right %.4f, lately %.4f",
                *(minutes, step, batch.ids.shape[1], loss, hit_rate, accuracy),
            )
        if time.process_time() - saved > save_every_s:
            save(average)
            saved = time.process_time()
        step += 1
    save(average)


@torch.no_grad()
def spread_embeddings(model: LlamaForCausalLM, *, alike: float = 0.8) -> int:
    """Move embeddings with a cosine above `alike` to another embedding in random directions. Return how many moved.

    A checkpoint that learned to guess among the words of a kind cannot distinguish them, and cannot learn to do so.
    """
    embeddings = model.get_parameter("model.embed_tokens.weight")
    directions = functional.normalize(embeddings, dim=-1)
    nearest = (directions @ directions.T).fill_diagonal_(-1).amax(dim=-1)
    chosen = nearest > alike
    noise = functional.normalize(torch.randn_like(embeddings), dim=-1) * embeddings.norm(dim=-1, keepdim=True)
    embeddings[chosen] = 0.5 * embeddings[chosen] + noise[chosen]
    return int(chosen.sum())


def save_atomically(model: LlamaForCausalLM, directory: Path) -> None:
    """Write `model` in bfloat16 to `directory`. The old content stays until the new content is complete."""
    partial, old = directory.with_suffix(".partial"), directory.with_suffix(".old")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    halved: LlamaForCausalLM = copy.deepcopy(model).bfloat16()
    halved.save_pretrained(partial)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def _next_batch(batches: TaskBatches, rng: random.Random, progress: float) -> Batch:
    """Make a batch for this progress, 0 to 1: repetitions and short tasks first, long tasks later."""
    repetition_share, lengths = next(stage[1:] for stage in _CURRICULUM if progress <= stage[0])
    if rng.random() < repetition_share:
        return batches.repetitions()
    return batches.tasks(rng.choice(lengths))


def _backward(
    model: LlamaForCausalLM, forward: DepthDroppingForward, batch: Batch, max_drop: float
) -> tuple[float, float]:
    """Add the gradient of the batch. Return its loss and the share of answer tokens that were right."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = forward(batch.ids, batch.positions, max_drop)
        logits = model.lm_head(hidden.flatten(0, 1)[batch.rows]).float()
    losses = functional.cross_entropy(logits, batch.targets, reduction="none")
    loss = (losses * batch.weights).sum() / batch.weights.sum()
    torch.autograd.backward(loss)
    hits = (logits.argmax(-1) == batch.targets)[batch.answered]
    return float(loss.detach()), float(hits.float().mean())


def _lr_factor(step: int, progress: float) -> float:
    return min(1.0, (step + 1) / 60) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * progress)))


def _parameter_groups(model: LlamaForCausalLM) -> list[dict[str, object]]:
    """Make groups with weight decay on matrices only: on embeddings it pulls the words of a kind together."""
    embedding = model.get_parameter("model.embed_tokens.weight")
    decayed = [parameter for parameter in model.parameters() if parameter.ndim == 2 and parameter is not embedding]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2 or parameter is embedding]
    return [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]


@torch.no_grad()
def _average_into(average: LlamaForCausalLM, model: LlamaForCausalLM, *, decay: float) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)


def _attend(layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    normed = layer.input_layernorm(hidden)
    attended, _ = layer.self_attn(hidden_states=normed, position_embeddings=(cos, sin), attention_mask=None)
    return hidden + attended  # type: ignore[no-any-return]


def _transform(layer: Any, hidden: Tensor) -> Tensor:
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


def chunked_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Compute causal attention of query [batch, heads, length, size], keys and values [batch, kv heads, length, size].

    Return [batch, length, heads, size]. Each chunk of queries uses only keys up to its end, as plain matrix products.
    """
    batch, num_heads, length, size = query.shape
    num_kv_heads = key.shape[1]
    if length > _MAX_CHUNKED_LENGTH or length % _QUERIES_PER_CHUNK:
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return attended.transpose(1, 2), None
    pairs, group = batch * num_kv_heads, num_heads // num_kv_heads
    query = (query * scaling).reshape(pairs, group, length, size)
    key, value = key.reshape(pairs, length, size), value.reshape(pairs, length, size)
    chunks = []
    for start in range(0, length, _QUERIES_PER_CHUNK):
        end = start + _QUERIES_PER_CHUNK
        chunk = query[:, :, start:end].reshape(pairs, group * _QUERIES_PER_CHUNK, size)
        scores = torch.bmm(chunk, key[:, :end].transpose(1, 2)).view(pairs, group, _QUERIES_PER_CHUNK, end)
        hidden = torch.arange(end) > torch.arange(start, end)[:, None]
        shares = torch.softmax(scores.float().masked_fill(hidden, -1e4), dim=-1).to(query.dtype)
        chunks.append(torch.bmm(shares.flatten(1, 2), value[:, :end]).view(chunk.shape).view(pairs, group, -1, size))
    return torch.cat(chunks, dim=2).view(batch, num_heads, length, size).transpose(1, 2), None


def _batch(ids: Tensor, positions: Tensor, weights: Tensor, answered: Tensor) -> Batch:
    """Make a batch. `weights` and `answered` [batch, length] are of each token as a target; weight 0 is no target."""
    targets = (weights[:, 1:] > 0).nonzero()
    rows, columns = targets[:, 0], targets[:, 1]
    return Batch(
        ids=ids,
        positions=positions,
        rows=rows * ids.shape[1] + columns,
        targets=ids[rows, columns + 1],
        weights=weights[rows, columns + 1],
        answered=answered[rows, columns + 1],
    )


def _name_ids(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return the ids of the corpus words that are one token; these words vary from report to report."""
    encoded = (tokenizer(f" {word}").input_ids for words in WORDS.values() for word in words)
    return torch.tensor(sorted({ids[0] for ids in encoded if len(ids) == 1}))


def _main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--minutes", type=float, required=True, help="CPU minutes to spend, all threads together")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--resume", type=Path, help="directory of a checkpoint to go on from")
    parser.add_argument("--spread-embeddings", action="store_true", help="first move embeddings apart that are alike")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--max-drop", type=float, default=0.25, help="probability that the last sublayer is skipped")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = load_tokenizer()
    if options.resume:
        model = LlamaForCausalLM.from_pretrained(options.resume, dtype=torch.float32)
    else:
        model = new_model(tokenizer)
    if options.spread_embeddings:
        logger.info("%d embeddings moved apart", spread_embeddings(model))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    train(
        model,
        tokenizer,
        cpu_seconds=options.minutes * 60,
        peak_lr=options.lr,
        max_drop=options.max_drop,
        resumed=options.resume is not None,
        seed=options.seed,
        save=lambda averaged: save_atomically(averaged, options.out),
    )


if __name__ == "__main__":
    _main()
