"""Tiny random models of every type that transformers maps to a causal LM, and what an engine makes of each.

`python -m tests.every_type` runs all of them, one after another, and writes `supported_models.csv` and its page,
docs/supported_models.md.
"""

import csv
import dataclasses
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rayspec.config import EngineConfig, SamplingParams, SpeculationOptions
from rayspec.decode.engine import Engine
from rayspec.decode.whole_model import WholeModelStages
from rayspec.local_engine import engine_like, load_engine, way_of
from rayspec.model.weights import WITH_TEXT_PART
from rayspec.ops.supported import TABLE, Supported, read_table, reason, recorded_warnings
from rayspec.strategies.fixed import FixedPlan, lookup_plan
from rayspec.types import CheckpointError, ConfigError, UnsupportedModelError
from tests.engines import complete, tokens_of

TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
PROMPT_LENGTHS = (1, 33, 300)
NUM_NEW_TOKENS = 12
_MODELS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "data" / "every_type.yaml").read_text("utf-8"))
_SIZES, _OPTIONS, VARIANTS = _MODELS["sizes"], _MODELS["options"], _MODELS["variants"]
CASES = (*TYPES, *VARIANTS)
# Types with recurrent layers that people run.
RECURRENT = ("qwen3_next", "qwen3_5", "granitemoehybrid", "nemotron_h", "falcon_h1", "lfm2", "mamba2")
PAGE = Path(__file__).parents[1] / "docs" / "supported_models.md"


def config_of(case: str) -> PretrainedConfig:
    """The type's own config, shrunk; with its own kinds of layers where it has several."""
    model_type = case.partition("#")[0]
    return _shrunk(CONFIG_MAPPING[model_type], _OPTIONS.get(model_type, {}) | VARIANTS.get(case, {}))


def _shrunk(config_class: Any, options: dict[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    chosen = {config_class.attribute_map.get(name, name): value for name, value in _SIZES.items() if name in names}
    if "kv_lora_rank" in names:  # latent attention has no groups of heads
        chosen["num_key_value_heads"] = _SIZES["num_attention_heads"]
    for name, part in _parts(config_class).items():
        chosen[name] = _shrunk(part, _OPTIONS.get(part.model_type, {}) | options.pop(name, {}))
    return config_class(**(chosen | options))


def _parts(config_class: Any) -> dict[str, Any]:
    if not config_class.sub_configs:
        return {}
    example = config_class()
    parts = {name: getattr(example, name, None) for name in config_class.sub_configs}
    return {
        name: CONFIG_MAPPING[part.model_type] if part.model_type in CONFIG_MAPPING else type(part)
        for name, part in parts.items()
        if isinstance(part, PretrainedConfig)
    }


def build(case: str, seed: int = 0, auto_class: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """A random model of the type, in which every parameter matters."""
    torch.manual_seed(seed)
    model: PreTrainedModel = auto_class.from_config(config_of(case), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            if weight.ndim < 2:
                weight.add_(noise * 0.15)
            elif "embed" in name or "wte" in name:
                weight.copy_(noise)
            else:
                weight.copy_(noise * 1.3 / weight[0].numel() ** 0.5)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(5, 200) for _ in range(length)] for length in PROMPT_LENGTHS]


def generated(folder: str, auto_class: Any = AutoModelForCausalLM) -> list[tuple[int, ...]]:
    """What `generate` of transformers makes of each prompt, in a model of its own for each."""
    outputs = []
    for prompt in prompts():
        model = auto_class.from_pretrained(folder, dtype=torch.float32).eval()
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NUM_NEW_TOKENS,
            pad_token_id=0,
        )
        outputs.append(tuple(output[0, len(prompt) :].tolist()))
    return outputs


def outcome(case: str, folder: Path) -> Supported:
    """Return the row of the case in the table of supported models, without names of models.

    Load the case's model, and require that it is refused in one sentence or generates what `generate` does."""
    missing = _save(case, folder)
    with recorded_warnings() as warnings:
        try:
            engine = load_engine(engine_config(str(folder), "auto"), with_tokenizer=False)
        except (CheckpointError, UnsupportedModelError, ConfigError) as error:
            return _refused(case, error, folder, missing)
    way = way_of(engine)
    strategies = ("static", "ar") if way == "drafts" else ()
    engines = [engine, *(engine_like(engine, engine_config(str(folder), strategy)) for strategy in strategies)]
    expected = generated(str(folder))
    for each in engines:
        assert each is not None, "the engine's weights cannot be shared"
        require(each, expected, case)
    if isinstance(engine.stages, WholeModelStages):  # in every round, whatever is expected to pay
        engine.replace_strategy(FixedPlan(lookup_plan(engine.stages.num_sublayers, 5)))
        if not any("one after another" in warning for warning in warnings):
            engine.stages.span.fewest_in_lockstep = 2
        require(engine, expected, case)
        assert (engine.stats.num_draft_tokens > 0) == (way == "copies")
    # Of a tiny model, matrices may be too narrow for int4.
    return Supported(case, "", way, reason([warning for warning in warnings if "no int4 copy" not in warning]))


def _refused(case: str, error: Exception, folder: Path, missing: str) -> Supported:
    why = str(error).replace(str(folder), "...")
    assert "\n" not in why
    assert len(why) < 400, why
    why = missing if missing and isinstance(error, CheckpointError) else reason([why])
    return Supported(case, "", "refused", why)


def _save(case: str, folder: Path) -> str:
    """Save a model of the case. If transformers cannot build it here, save what must be refused; return the reason."""
    try:
        config = config_of(case)
        build(case).save_pretrained(folder)
    except (ImportError, AttributeError, ValueError, TypeError, StrictDataclassError) as error:
        (folder / "config.json").write_text(json.dumps({"model_type": case}))
        reason = " ".join(str(error).split()).partition(". ")[0][:160]
        return f"not built: transformers refuses this config ({reason})"
    if "text_config" in config.sub_configs:  # the model has only this part, while the hub has the whole config
        config.save_pretrained(folder)
    return ""


def require(engine: Engine, expected: list[tuple[int, ...]], case: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS)
    strategy = engine.config.speculation.strategy
    alone = tokens_of(complete(engine, prompts()[1:2], params))
    together = tokens_of(complete(engine, prompts(), params))
    assert alone == expected[1:2], f"{case}, {strategy}, one prompt"
    assert together == expected, f"{case}, {strategy}, three prompts together"


def engine_config(folder: str, strategy: str) -> EngineConfig:
    skip = (2, 5) if strategy == "static" else ()
    return EngineConfig(
        model=folder,
        dtype="float32",
        device="cpu",
        max_model_len=400,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        kv_cache_tokens=1200,
        speculation=SpeculationOptions(strategy=strategy, gate=False, skip=skip),
    )


def page(rows: Sequence[Supported]) -> str:
    """Return the page that shows these rows, in Markdown."""
    ways = [row.way for row in rows if "#" not in row.type]
    popular, others = [row for row in rows if row.models], [row for row in rows if not row.models]
    return (
        "# Supported models\n\n"
        f"transformers {transformers.__version__} maps {len(ways)} model types to a causal LM:\n\n"
        f"- **drafts**: {ways.count('drafts')} types split into attention and MLP, and generate with drafts;\n"
        f"- **copies**: {ways.count('copies')} types do not split. Their drafts are copied or recycled tokens, which "
        "transformers' own\n  forward verifies;\n"
        f"- **plain**: {ways.count('plain')} types generate without drafts, through transformers' own forward;\n"
        f"- **refused**: {ways.count('refused')} types are refused at load. The column says why.\n\n"
        "`rayspec models` prints this table. `rayspec models MODEL` loads a model and says what it does: a "
        "checkpoint can differ from the\ntiny model of its type. `python -m tests.every_type` writes the table. It "
        "makes a tiny random model of each type, and requires the tokens\nof `generate(do_sample=False)` for prompts "
        "of 1, 33 and 300 tokens, alone and together. Rows with `#` are variants of a type.\n\n"
        f"A checkpoint with vision of type {', '.join(WITH_TEXT_PART)}, llama4 or mllama loads its language "
        "model only: prompts are texts.\n\n## Popular models\n\n"
        "| type | models | way | why |\n|---|---|---|---|\n"
        + "".join(f"| {row.type} | {row.models} | {row.way} | {_cell(row.why)} |\n" for row in popular)
        + "\n## Other types\n\n| type | way | why |\n|---|---|---|\n"
        + "".join(f"| {row.type} | {row.way} | {_cell(row.why)} |\n" for row in others)
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def save(rows: Sequence[Supported]) -> None:
    """Write the table and its page."""
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in dataclasses.fields(Supported)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(dataclasses.asdict, rows))
    PAGE.write_text(page(rows), encoding="utf-8")


def main() -> None:
    """Write the table and its page. Raises AssertionError at the first type whose text is wrong."""
    torch.set_num_threads(1)
    before = {row.type: row.models for row in read_table()}
    rows = []
    for case in (*(case for case in before if case in CASES), *sorted(set(CASES) - before.keys())):
        with tempfile.TemporaryDirectory(prefix="rayspec-types-") as folder:
            rows.append(dataclasses.replace(outcome(case, Path(folder)), models=before.get(case, "")))
    save(rows)


if __name__ == "__main__":
    main()
