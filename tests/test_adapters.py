"""LoRA adapters, saved by peft: each text is that of the model into which peft has merged its adapter."""

import asyncio
import copy
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rayspec import LLM, LoRARequest, SamplingParams
from rayspec.config import EngineConfig
from rayspec.llm import AsyncEngine
from rayspec.openai.answer import respond
from rayspec.openai.requests import CompletionRequest, InvalidRequestError
from rayspec.ops.plan import auto
from rayspec.types import CheckpointError, ConfigError
from tests.demo_model import demo_tokenizer
from tests.families import checkpoint, greedy

SIZES = (5, 33, 40, 70, 40)
USES = ("a", "b", None, "a", "b")
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 256}
COPIES = {"strategy": "static", "static_choice": "int4", "max_draft_tokens": 3}
SKIPS = {"strategy": "static", "skip": [5], "max_draft_tokens": 3}
ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"r": 8, "lora_alpha": 16},
    "b": {
        "r": 4,
        "lora_alpha": 3,
        "use_rslora": True,
        "alpha_pattern": {"o_proj": 5, r"^model\.layers\.[12]\.mlp\.gate_proj": 40},
        "rank_pattern": {"down_proj": 2},
    },
}
MATRICES = {"phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@cache
def adapters(family: str, folder: Path) -> dict[str | None, str]:
    """Folders of the base model, under None, and of its adapters."""
    found: dict[str | None, str] = {None: checkpoint(family)}
    for name, options in ADAPTERS.items():
        torch.manual_seed(ord(name))
        targets = MATRICES.get(family, ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])
        config = LoraConfig(target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **options)
        place = folder / f"{family}-{name}"
        get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint(family)), config).save_pretrained(place)
        found[name] = str(place)
    return found


@cache
def merged(family: str, name: str, folder: Path) -> str:
    place = folder / f"{family}-{name}-merged"
    base = AutoModelForCausalLM.from_pretrained(checkpoint(family))
    PeftModel.from_pretrained(base, adapters(family, folder)[name]).merge_and_unload().save_pretrained(place)
    return str(place)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(3, 100, (size,), generator=generator).tolist() for size in SIZES]
    return [*made[:-1], made[2]]  # the last is alike to the third, and has another adapter


def expected(family: str, folder: Path, uses: Sequence[str | None]) -> list[tuple[int, ...]]:
    models = [checkpoint(family) if name is None else merged(family, name, folder) for name in uses]
    return [greedy(model, [prompt], PARAMS.max_tokens or 0)[0] for model, prompt in zip(models, prompts(), strict=True)]


def loaded(model: str, **options: Any) -> LLM:
    return LLM(model, tokenizer=demo_tokenizer().name_or_path, **OPTIONS | options)


def texts(llm: LLM, uses: Sequence[LoRARequest | None] | None) -> list[tuple[int, ...]]:
    given = [{"prompt_token_ids": prompt} for prompt in prompts()]
    outputs = llm.generate(given, PARAMS, lora_request=uses, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def requests(found: dict[str | None, str]) -> list[LoRARequest | None]:
    return [None if name is None else LoRARequest(name, 1, found[name]) for name in USES]


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma2", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("qwen3", "mistral", "granite"))],
)
@pytest.mark.parametrize("speculation", [{"strategy": "ar"}, COPIES, SKIPS], ids=["ar", "copies", "skips"])
def test_adapters_beside_one_another_equal_merged_models(family: str, speculation: Any, folder: Path) -> None:
    found, known = adapters(family, folder), expected(family, folder, USES)
    assert known != expected(family, folder, [None] * len(USES))
    with loaded(checkpoint(family), lora_modules={"a": found["a"]}, speculation=speculation) as llm:
        assert texts(llm, requests(found)) == known  # b is loaded now
        assert texts(llm, requests(found)) == known  # from cached pages
        assert (llm.stats.num_accepted_tokens > 0) == (speculation["strategy"] == "static")
        assert llm.stats.num_cached_tokens > 0
        with pytest.raises(ConfigError, match="name it otherwise"):
            texts(llm, [LoRARequest("a", 1, found["b"] or "")] * len(USES))


@pytest.mark.exhaustive
@pytest.mark.ray
def test_stages_have_the_adapters_too(folder: Path, ray_cluster: None) -> None:
    found, parallel = adapters("llama", folder), {"stages": 2, "cpus_per_shard": 0.25}
    modules = {name: found[name] for name in ADAPTERS}
    with loaded(checkpoint("llama"), lora_modules=modules, speculation=COPIES, parallel=parallel) as llm:
        assert texts(llm, requests(found)) == expected("llama", folder, USES)


def test_the_folder_of_an_adapter_is_its_base_model_with_it(folder: Path, tmp_path: Path) -> None:
    place = changed(adapters("llama", folder)["a"], tmp_path / "changed", revision="v2")
    with loaded(place, speculation={"strategy": "ar"}) as llm:
        assert llm.config.revision == "v2"
        assert texts(llm, None) == expected("llama", folder, ["a"] * len(USES))


def test_the_folder_of_an_adapter_may_have_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    """As training saves it, with the chat template of its texts."""
    place, tokenizer = changed(adapters("llama", folder)["a"], tmp_path / "a"), copy.deepcopy(demo_tokenizer())
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(place)
    with LLM(place, **OPTIONS, speculation={"strategy": "ar"}) as llm:
        expected_tokens = tokenizer("one two", add_special_tokens=False)["input_ids"]
        assert llm.chat_tokens([{"role": "user", "content": "one two"}]) == expected_tokens


def test_auto_lays_out_the_base_model_of_an_adapters_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out: list[EngineConfig] = []
    monkeypatch.setattr(auto, "with_layout", lambda config: laid_out.append(config) or config)
    with loaded(adapters("llama", folder)["a"] or "", parallel="auto", speculation={"strategy": "ar"}):
        assert [(one.model, [*one.lora_modules]) for one in laid_out] == [(checkpoint("llama"), ["llama-a"])]


def test_requests_of_the_endpoint_name_an_adapter_as_their_model(folder: Path) -> None:
    found = adapters("llama", folder)
    llm = loaded(checkpoint("llama"), lora_modules={"a": found["a"]}, speculation={"strategy": "ar"})
    engine, known = AsyncEngine(llm), expected("llama", folder, ["a", "b", "a", "a", "a"])

    def asked(model: str) -> Any:
        body = {"model": model, "prompt": prompts()[0], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        request = CompletionRequest.parse(body | {"return_token_ids": True})
        return asyncio.run(respond(request, engine, ("base",), name="1", created=1))

    try:
        answer = asked("a")
        assert (answer.model, tuple(answer.choices[0].token_ids)) == ("a", known[0])
        assert tuple(asked("base").choices[0].token_ids) != known[0]
        with pytest.raises(InvalidRequestError, match="'b' does not exist; served here: 'base', 'a'"):
            asked("b")
    finally:
        engine.llm.shutdown()


def changed(source: str | None, place: Path, *, tensors: Any = None, **config: Any) -> str:
    """A copy of an adapter with another config, or with these tensors."""
    place.mkdir()
    before = json.loads(Path(str(source), "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps(before | config))
    held = load_file(Path(str(source), "adapter_model.safetensors")) if tensors is None else tensors
    save_file(held, place / "adapter_model.safetensors")
    return str(place)


LAYER = "base_model.model.model.layers.1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora True, which is not supported: merge it into the model"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\]"),
        ({"peft_type": "IA3"}, "peft_type 'IA3', not LORA"),
        # The first pattern takes Python's own search longer than a life.
        ({"alpha_pattern": {r"(\w+\.?)+[^\w.]": 1, "(": 1}}, "pattern of alphas that cannot be used"),
        ({"alpha_pattern": {"(((((x{900}){900}){900})))": 4}}, "a pattern may have 256 characters, and no '{'"),
        ({"tensors": {f"layers.1.{'a.' * 200}lora_A.weight": torch.ones(1, 1)}}, "which is not supported"),
        ({"tensors": {"base_model.model.lm_head.lora_A.weight": torch.ones(1, 1)}}, "lm_head.lora_A.weight"),
        (
            {"tensors": {f"{LAYER}.self_attn.q_proj.lora_{one}.weight": torch.ones(2, 2) for one in "AB"}},
            r"q_proj of layer 1 is for \(2, 2\), and the model has",
        ),
        (
            {"tensors": {f"{LAYER}.mlp.router.lora_{one}.weight": torch.ones(2, 2) for one in "AB"}},
            "router of layer 1 is no matrix of attention or MLP",
        ),
        (
            {"tensors": {f"{LAYER}7.mlp.up_proj.lora_{one}.weight": torch.ones(2, 2) for one in "AB"}},
            "it has layer 17, and the model only 4",
        ),
        (
            {
                "tensors": {
                    f"{LAYER}.mlp.up_proj.lora_A.weight": torch.ones(2, 64),
                    f"{LAYER}.mlp.up_proj.lora_B.weight": torch.ones(96, 3),
                }
            },
            "up_proj.lora_A.weight",
        ),
        ({"tensors": {f"{LAYER}.mlp.up_proj.lora_B.weight": torch.ones(96, 2)}}, "up_proj.lora_B.weight"),
        (
            {
                "tensors": {
                    f"base_model.model.model.{of}.layers.1.self_attn.q_proj.lora_{one}.weight": torch.ones(64, 64)
                    for of in ("language_model", "vision_tower")
                    for one in "AB"
                }
            },
            "two products for q_proj of layer 1",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    change: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    place = changed(adapters("llama", folder)["a"], tmp_path / "changed", **change)
    with pytest.raises(CheckpointError, match=message):
        loaded(checkpoint("llama"), lora_modules={"odd": place})


def test_an_adapter_for_sublayers_without_two_matrices_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="sublayer 0 is run by transformers' modules"):
        loaded(checkpoint("phi3"), lora_modules={"a": adapters("phi3", folder)["a"]})


def test_an_adapter_that_does_not_fit_leaves_nothing_for_the_next(folder: Path, tmp_path: Path) -> None:
    found = adapters("llama", folder)
    tensors = load_file(Path(str(found["b"]), "adapter_model.safetensors"))
    late = {name: torch.ones(2, 2) if "layers.3.mlp" in name else tensor for name, tensor in tensors.items()}
    few = {name: tensor for name, tensor in tensors.items() if "layers.3.self_attn.q_proj" in name}
    odd, small = (changed(found["b"], tmp_path / name, tensors=held) for name, held in (("odd", late), ("few", few)))
    with loaded(checkpoint("llama"), speculation={"strategy": "ar"}) as llm:
        with pytest.raises(CheckpointError, match="layer 3 is for"):
            texts(llm, [LoRARequest("odd", 1, odd)] * len(USES))
        after = texts(llm, [LoRARequest("few", 1, small)] * len(USES))
    with loaded(checkpoint("llama"), lora_modules={"few": small}, speculation={"strategy": "ar"}) as llm:
        assert texts(llm, [LoRARequest("few")] * len(USES)) == after


def test_a_request_for_an_adapter_gets_it_whatever_its_name(folder: Path) -> None:
    found = adapters("llama", folder)
    with loaded(checkpoint("llama"), speculation={"strategy": "ar"}) as llm:
        known = texts(llm, [LoRARequest("a", 1, str(found["a"]))] * len(USES))
        assert texts(llm, [LoRARequest("", 1, str(found["a"]))] * len(USES)) == known
        odd: Any
        for odd in (LoRARequest(None, 1, found["a"]), LoRARequest("b", 1, 5), LoRARequest(["b"], 1, found["b"])):  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="lora_name and lora_path are texts"):
                texts(llm, [odd] * len(USES))


def test_a_missing_adapter_is_named(tmp_path: Path) -> None:
    for name in ("empty", "nested"):
        (tmp_path / name).mkdir()
    (tmp_path / "nested" / "adapter_config.json").write_text('{"a": ' + "[" * 100_000)
    for options, message in (
        ({"lora_modules": {"a": str(tmp_path / "empty")}}, "no readable adapter_config.json"),
        ({"lora_modules": {"a": str(tmp_path / "nested")}}, "recursion"),
        ({"adapter": "a"}, "option 'adapter' is 'a': name one of 'lora_modules' (none)"),
        ({"lora_modules": {"a": "x"}, "offload": {}}, "'lora_modules' does not work with option 'offload'"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=re.escape(message)):
            loaded(checkpoint("llama"), **options)
    with loaded(checkpoint("llama"), speculation={"strategy": "ar"}) as llm:
        (output,) = llm.generate({"prompt_token_ids": [3]}, PARAMS, lora_request=LoRARequest("b"), use_tqdm=False)
        assert "adapter 'b' is not loaded: name it in option 'lora_modules' (none now)" in str(output.error)


def test_a_model_that_does_not_split_says_to_merge_the_adapter(folder: Path) -> None:
    with loaded(checkpoint("gpt_neox"), speculation={"strategy": "ar"}) as llm:
        adapter = LoRARequest("a", 1, adapters("llama", folder)["a"])
        with pytest.raises(ConfigError, match=r"'a' needs a model that splits into sublayers: merge it"):
            llm.generate([{"prompt_token_ids": [5]}], PARAMS, lora_request=adapter, use_tqdm=False)


def test_with_deterministic_an_adapter_gives_the_same_bits_with_and_without_drafts(folder: Path) -> None:
    found, params, runs = adapters("llama", folder), PARAMS.replace(logprobs=2), []
    for speculation, batch in (({"strategy": "ar"}, 1), (SKIPS, 5)):
        options: dict[str, Any] = {"deterministic": True, "max_num_seqs": batch, "speculation": speculation}
        with loaded(checkpoint("llama"), lora_modules={name: found[name] for name in "ab"}, **options) as llm:
            given = [{"prompt_token_ids": prompt} for prompt in prompts()]
            outputs = llm.generate(given, params, lora_request=requests(found), use_tqdm=False)
            runs.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
            assert (llm.stats.num_accepted_tokens > 0) == (batch > 1)
    assert runs[0] == runs[1]
