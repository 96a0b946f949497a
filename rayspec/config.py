"""All options: frozen, strict, each with its default in one place. Imports neither torch nor ray."""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import TIMEOUT_MAX
from typing import Annotated, Any, Literal, TypedDict, get_args

import pydantic
from pydantic import BeforeValidator, Field, field_validator, model_validator
from typing_extensions import Self, Unpack

from rayspec.choices import FULL, QUANTISED_WEIGHTS, SKIP, Choice, Weights, combinations, keys_of, weights_of
from rayspec.errors import ConfigError, plainly
from rayspec.machine import has_gpu
from rayspec.structured import StructuredOutputsParams
from rayspec.vllm_names import ENGINE, SAMPLING, from_vllm, naming_given

DType = Literal["auto", "float32", "bfloat16", "float16"]
Cheaper = Literal["skip", "int8", "int4", "window", "pages"]
Strategy = Literal[
    "auto",
    "knapspec",
    "lookup",
    "recycling",
    "static",
    "ar",
    "swift",
    "self-sd",
    "knn-ssd",
    "layerskip",
    "clasp",
    "del",
    "asd",
    "lookahead",
]
# Strategies whose drafts use option `choices`. Drafts of the others run sublayers in full or not at all (not static).
_CHOOSING = ("knapspec", "auto", "self-sd", "knn-ssd")
Verification = Literal["coupled", "rejection"]
DataPlane = Literal["auto", "frames", "collective"]
OfCheckpoint = Literal["auto", "none"]
CudaGraphs = Literal["auto", "on", "off"]
CudaKernels = Literal["auto", "off"]
ToolCallParser = Literal["hermes", "llama3_json", "mistral", "openai", "qwen3_coder"]
ReasoningParser = Literal["deepseek_r1", "openai_gptoss", "qwen3"]
# Share of the memory that is free once the model is loaded. Smaller on a CPU, whose memory others use too.
KV_CACHE_SHARE = {"cpu": 0.25, "cuda": 0.8}
MAX_TREE_TOKENS = 62  # of a draft that has branches, over all of them: with the newest token, bits of one int64
Placement = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]


_NUMBERS = (int, float, int | None, float | None)
_ENGINE_KWARGS = "engine_kwargs"  # a mapping, whose names are those of EngineConfig


class Options(pydantic.BaseModel):
    """Base of all option groups. Raises ConfigError naming the option, the value and the nearest valid name."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            own = [dict(item) for item in error.errors() if item["type"] != "default_factory_not_called"]
            raise ConfigError("; ".join(_explain(type(self), item) for item in own)) from None

    @model_validator(mode="wrap")
    @classmethod
    def _names_are_texts(cls, options: Any, handler: pydantic.ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(options, dict) and not all(isinstance(name, str) for name in options):
            raise ValueError("its names must be texts")
        return handler(options)

    @field_validator("*", mode="before", check_fields=False)
    @classmethod
    def _no_truth_value_as_number(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation in _NUMBERS:
            raise ValueError("give a number")
        if isinstance(value, list | tuple) and (found := [one for one in value if isinstance(one, bool)]):
            raise ValueError(f"it has {found[0]}, which is no number and no text")
        return value

    @model_validator(mode="after")
    def _fits_the_machine(self) -> Self:
        for name, value in self:
            too_large = [number for number in _integers(value) if not -(2**63) <= number < 2**63]
            if too_large:
                raise ValueError(f"option {name!r} is {too_large[0]}: it must fit 64 bits")
            if name.endswith("_s") and isinstance(value, int | float) and value > TIMEOUT_MAX:
                raise ValueError(f"option {name!r} is {value:g}: it must be at most {TIMEOUT_MAX:g} seconds")
        return self

    def replace(self, **changes: Any) -> Self:
        """Return a copy with `changes` applied. All options are validated again."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)

    def __hash__(self) -> int:
        return hash(json.dumps(self.model_dump(mode="json"), sort_keys=True))  # some options are mappings

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(f"{type(self).__name__} cannot change: use its copy by replace({name}={value!r})")


_FIXED = "is gone: its default is what everybody used; leave it out"
_PUBLISHED = "is gone: its numbers are the published ones; leave it out"
_THRESHOLD = "'threshold' and 'exit_threshold' are now 'speculation.draft_threshold'"
_SEARCH = "'interval' is now 'speculation.search_interval', 'num_tap_tokens' is now 'speculation.num_search_tokens'"
# Options that are gone or belong to Ray Data LLM, by the class that would have them, and what to do instead.
REPLACED: Mapping[str, Mapping[str, str]] = {
    "SpeculationOptions": {
        "knapsack": f"is gone: {_SEARCH}; leave out the others, which are fixed",
        "clasp": f"is gone: {_SEARCH}, and {_THRESHOLD}; leave out 'num_skipped_layers', which is half of the layers",
        "dynamic_exit": f"is gone: {_SEARCH}; leave out the others, which are fixed",
        "asd": f"is gone: {_SEARCH}, and {_THRESHOLD}; leave out the others, which are fixed",
        "self_sd": f"is gone: {_THRESHOLD}; leave out the others, which are fixed",
        "knn_ssd": f"is gone: {_THRESHOLD}; leave out 'reject_distance', which is saved with each plan",
        "swift": f"is gone: {_THRESHOLD}, 'context_window' is now 'speculation.num_search_tokens'; leave out the "
        "others, which are the published ones",
        "layerskip": "is gone: 'exit_layer' is now 'speculation.exit_layer'; drafts have 6 tokens, or "
        "'max_draft_tokens' if that is less",
        "lookup_tokens": "is gone: drafts have 10 tokens, or 'max_draft_tokens' if that is less",
        "max_tree_tokens": f"is gone: drafts with branches have at most {MAX_TREE_TOKENS} tokens; leave it out",
        **dict.fromkeys(("lookahead", "attention_cosine", "num_skipped_layers"), _PUBLISHED),
        **dict.fromkeys(("lookup_ngram", "confidence_stop"), _FIXED),
    },
    "TuningOptions": {
        "threshold": "is now 'speculation.draft_threshold'",
        "plans_by": "is gone: plans are tuned by trials; leave it out",
        **dict.fromkeys(("seed", "num_anchors"), _FIXED),
    },
    "ProcessorConfig": {
        "model": "is refused: give 'model_source'",
        **dict.fromkeys(
            ("apply_chat_template", "tokenize", "detokenize", "tokenize_stage", "detokenize_stage"),
            "is not needed: the columns of a row say what it needs; leave it out",
        ),
        **dict.fromkeys(
            ("has_image", "prepare_multimodal_stage", "task_type"), "is refused: models complete texts; leave it out"
        ),
        **dict.fromkeys(
            ("max_pending_requests", "max_tasks_in_flight_per_actor"), "is refused: give 'max_concurrent_batches'"
        ),
        "accelerator_type": "is refused: give engine_kwargs={'parallel': {'labels': "
        "{'ray.io/accelerator-type': 'H100'}}}",
        "placement_group_config": "is refused: give engine_kwargs={'parallel': {'stages': 2, 'placement': 'SPREAD'}}",
        "chat_template_stage": "is refused: rows with 'messages' use the model's template; for another, let preprocess "
        "make the 'prompt'",
        "dynamic_lora_loading_path": "is refused: give engine_kwargs={'lora_modules': {'NAME': 'FOLDER'}, "
        "'adapter': 'NAME'}, which all rows use",
        "runtime_env": "is refused: give it to ray.init() instead",
        "log_engine_metrics": "is not needed: each row has its metrics; leave it out",
    },
}


def _explain(options: type[Options], error: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        if (replaced := REPLACED.get(options.__name__, {}).get(name)) is not None:
            return f"option {name!r} {replaced}"
        valid = sorted(options.model_fields)
        if (home := _home(options, name, error["input"])) is not None:
            return f"unknown option {name!r} here: {home}"
        of_vllm = {"EngineConfig": ENGINE, "SamplingParams": SAMPLING}.get(options.__name__, {})
        near = difflib.get_close_matches(name, [*valid, *of_vllm], n=1)
        return f"unknown option {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(valid)}")
    if error["type"] == "missing":
        remedy = "a folder, a hub id such as Qwen/Qwen3-8B, a GGUF file, or 'demo'"
        if name != "model":
            field = options.model_fields.get(name)
            remedy = (field and field.description) or "a value"
        return f"option {name!r} is missing: give it {remedy}"
    value, message = error["input"], plainly(str(error["msg"]))
    if isinstance(error.get("ctx", {}).get("error"), ConfigError):
        return f"in {name!r}: {message}" if name else message
    if error["type"] == "literal_error" and isinstance(value, str):
        near = difflib.get_close_matches(value, re.findall(r"'(.+?)'", error["ctx"]["expected"]), n=1)
        message += f"; did you mean {near[0]!r}?" if near else ""
    field = options.model_fields.get(name.partition(".")[0])
    shown = f" is {value!r}" if field is None or field.repr else ""  # else it is secret
    return f"option {name!r}{shown}: {message}" if name else message


def _home(options: type[Options], name: str, value: Any) -> str | None:
    """Return where an option belongs that stands in a place too high, or among options of another kind."""
    homes = [
        f"{group}={{{name!r}: {value!r}}}"
        for group, info in options.model_fields.items()
        for kind in (*get_args(info.annotation), info.annotation, *([EngineConfig] if group == _ENGINE_KWARGS else []))
        if isinstance(kind, type) and issubclass(kind, Options) and name in kind.model_fields
    ]
    if homes:
        return f"give {' or '.join(homes)}"
    if options is EngineConfig and name in SamplingParams.model_fields:
        return f"give SamplingParams({name}={value!r}) to `generate` or `chat`; in a file, put it under 'sampling'"
    if options is SamplingParams and name in EngineConfig.model_fields:
        return "it is an option of the engine, as LLM(...) takes it"
    return None


def _split_at_commas(value: Any) -> Any:
    texts = (value,) if isinstance(value, str) else value
    if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
        return [part.strip() for text in texts for part in text.split(",")]
    return value


def _split_pairs(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    pairs = [pair.partition("=") if isinstance(pair, str) else ("", "", "") for pair in value]
    if not all(name and text for name, _, text in pairs):
        raise ValueError("write it as NAME=VALUE")
    found = {name: text for name, _, text in pairs}
    if len(found) < len(pairs):
        raise ValueError("a name stands twice; leave one out")
    return found


# Of an option that is a tuple: a flag gives `1,2`, or is repeated. Of a mapping: each flag gives NAME=VALUE.
Commas, Pairs = BeforeValidator(_split_at_commas), BeforeValidator(_split_pairs)


# Other names of data types, which vLLM and torch take too.
_DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def _spelled(dtype: Any) -> Any:
    """Return the name of a data type as the option has it. dtype: a name, or a `torch.dtype`."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)


def _integers(value: Any) -> list[int]:
    """Return the integers in the value of an option, or in its keys."""
    several = value if isinstance(value, tuple | dict) else (value,)
    return [one for one in several if isinstance(one, int)]


_UNSET = "unset: the checkpoint's, else "


class SamplingKeywords(TypedDict, total=False):
    """The keywords of `SamplingParams(...)`: its fields."""

    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Iterable[str] | None
    stop_token_ids: Iterable[int] | None
    bad_words: Iterable[str] | None
    allowed_token_ids: Iterable[int] | None
    ignore_eos: bool
    max_tokens: int | None
    min_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    logit_bias: Mapping[int, float] | None
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    include_stop_str_in_output: bool
    detokenize: bool
    truncate_prompt_tokens: int | None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None
    use_drafts: bool


class SamplingParams(Options):
    """How one request is sampled. Names, defaults and limits are vLLM's.

    None is unset: the checkpoint's generation_config.json decides, and vLLM's neutral value if the file says nothing.
    So greedy decoding equals `generate(do_sample=False)` of the checkpoint as it is.

    temperature 0 (or below 1e-5) is greedy. `max_tokens` None: as many as the context and the KV
    cache have room for. `seed` None draws a
    fresh seed, and so does -1; with a seed the text is a pure function of (model, prompt, parameters). `logprobs` k
    returns the chosen token and the k most likely ones, `prompt_logprobs` k the same for each token of the prompt.
    """

    n: int = Field(1, ge=1, le=1024)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="subtracted for tokens that the output has")
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="subtracted as often as the output has a token")
    repetition_penalty: float | None = Field(None, gt=0.0, description=f"divides the logits of known tokens; {_UNSET}1")
    # a larger one is infinite in 32 bits
    temperature: float | None = Field(None, ge=0.0, le=3e38, description=f"of sampling; 0: greedy; {_UNSET}1")
    top_p: float | None = Field(
        None, gt=0.0, le=1.0, description=f"sample from the likeliest tokens of this total; {_UNSET}1"
    )
    top_k: int | None = Field(None, ge=-1, description=f"sample from this many likeliest tokens; {_UNSET}0: all")
    min_p: float | None = Field(
        None, ge=0.0, le=1.0, description=f"least probability as a share of the largest; {_UNSET}0"
    )
    seed: int | None = Field(None, description="seed of sampling; unset: another in each run")
    stop: tuple[str, ...] | None = Field(None, description=f"texts that end the output; {_UNSET}none")
    stop_token_ids: Annotated[tuple[int, ...], Commas] = Field((), description="tokens that end the output")
    bad_words: tuple[str, ...] = Field((), description="words whose tokens the output never has, nor after a space")
    allowed_token_ids: Annotated[tuple[int, ...] | None, Commas] = Field(
        None, description="the only tokens that the output may contain"
    )
    ignore_eos: bool = Field(False, description="go on after the token that ends a text")
    max_tokens: int | None = Field(16, ge=1, description="most tokens of the output")
    min_tokens: int | None = Field(None, ge=0, description=f"fewest tokens of the output; {_UNSET}0")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="log-probabilities of this many tokens at each position"
    )
    prompt_logprobs: int | None = Field(None, ge=0, le=20, description="the same for the prompt")
    logit_bias: dict[int, float] = Field(default_factory=dict)
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
    spaces_between_special_tokens: bool = Field(True, description="spaces between special tokens that are kept")
    include_stop_str_in_output: bool = Field(False, description="keep the text of the stop string or token")
    detokenize: bool = Field(True, description="return texts, not only token ids")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="keep only this many tokens at the end of a prompt; -1: as many as fit"
    )
    structured_outputs: StructuredOutputsParams | None = Field(None, description="the form that the output must have")
    use_drafts: bool = Field(True, description="False: plain decoding for this request; the text is the same")

    def __init__(self, **values: Unpack[SamplingKeywords]) -> None:
        super().__init__(**from_vllm(values, SAMPLING, type(self).model_fields))

    def clone(self) -> Self:
        return self.model_copy()

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_or_many(cls, stop: Any) -> Any:
        if stop is None or isinstance(stop, str):
            return stop if stop is None else (stop,)
        if isinstance(stop, Mapping | bytes) or not isinstance(stop, Iterable):
            raise ValueError("give a text or a list of texts")  # noqa: TRY004 - as pydantic wants it
        return tuple(stop)

    @field_validator("stop_token_ids", "logit_bias", "bad_words", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        empty: Any = {} if info.field_name == "logit_bias" else ()
        return empty if value is None else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _tokens_in_digits(cls, bias: Any) -> Any:
        for token in bias if isinstance(bias, Mapping) else ():
            if isinstance(token, str) and not re.fullmatch("-?(0|[1-9][0-9]*)", token):  # int() reads more than that
                raise ValueError(f"its key {reprlib.repr(token)} is no token: give a whole number in digits")
        return bias

    @field_validator("seed")
    @classmethod
    def _no_seed(cls, seed: int | None) -> int | None:
        return None if seed == -1 else seed

    @field_validator("structured_outputs", mode="before")
    @classmethod
    def _mapping_or_object(cls, value: Any) -> Any:
        return StructuredOutputsParams.of(value) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in ("stop", "bad_words"):
            if "" in (getattr(self, name) or ()):
                raise ValueError(f"option {name!r} holds an empty string: leave it out")
        if self.stop_token_ids and min(self.stop_token_ids) < 0:
            raise ValueError(f"option 'stop_token_ids' holds {min(self.stop_token_ids)}: give tokens from 0 on")
        if self.allowed_token_ids == ():
            raise ValueError("option 'allowed_token_ids' is empty: name a token, or leave it out")
        if self.stop and not self.detokenize and type(self) is SamplingParams:  # a checkpoint's may be there
            raise ValueError("option 'stop' needs texts: leave out detokenize=False, or give stop_token_ids")
        if not (self.spaces_between_special_tokens or self.skip_special_tokens):
            raise ValueError(
                "option 'spaces_between_special_tokens' is False: give True, or leave out skip_special_tokens=False"
            )
        if self.truncate_prompt_tokens == 0:
            raise ValueError("option 'truncate_prompt_tokens' is 0: give a number from 1 on, or -1")
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"option 'min_tokens' is {self.min_tokens}: it must not exceed max_tokens, which is {self.max_tokens}"
            )
        if any(not -100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise ValueError("option 'logit_bias' must lie between -100 and 100")
        return self


class TuningOptions(Options):
    """How plans are tuned on calibration prompts. Numeric defaults are those of Self-SD, which tunes on 8 prompts."""

    num_tries: int = Field(1000, ge=1, description="plans that are tried on the prompts of a domain")
    max_seconds: float = Field(3600.0, gt=0.0, description="seconds after which no further plan of a domain is tried")
    max_tokens: int = Field(32, ge=2, description="tokens generated from each prompt")


class SpeculationOptions(Options):
    """How, and whether, drafts are made.

    strategy: "knapspec" (plans chosen while running), "lookup" (drafts found in the sequence's own text), "recycling"
    (trees of tokens that the target found likely before), "auto" (the best of these in each round), "lookahead"
    (n-grams made by Jacobi iteration), "static" (always skips the sublayers in `skip` and runs the others by
    `static_choice`), "ar" (no drafts).
    Strategies published by others: "clasp", "del", "asd", "swift", "self-sd", "knn-ssd", "layerskip"; self-sd and
    knn-ssd use saved plans (`warm_start`). Their other numbers are the published ones.
    "module:name" is a strategy of your own: see docs/adding_a_strategy.md.
    verification: "coupled" (text depends on the seed only) or "rejection" (higher acceptance when sampling).
    """

    strategy: Strategy | str = Field("auto", description="how drafts are made; ar: none")
    verification: Verification = Field("coupled", description="how drafts are verified; only sampled text differs")
    max_draft_tokens: int = Field(16, ge=1, le=127, description="the most tokens of a draft")
    corpus_tokens: int = Field(
        1 << 20,
        ge=0,
        description="auto: tokens of finished outputs that are kept, from which later texts copy; 0: none",
    )
    corpus: str | None = Field(
        None,
        description="auto: text, JSON-lines or Parquet file of texts like those expected, copied from the start; at "
        "most corpus_tokens are read",
    )
    draft_threshold: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="clasp, asd, swift, self-sd, knn-ssd, tuning: top-1 probability below which a draft ends, at "
        "first where it follows the acceptance; unset: the strategy's published value",
    )
    num_search_tokens: int | None = Field(
        None, ge=1, le=256, description="recently committed tokens that a search looks at; unset: 8, swift 32"
    )
    search_interval: int | None = Field(
        None,
        ge=1,
        description="clasp, del, asd: tokens of one sequence between two searches; unset: clasp 128, del 1, asd 64",
    )
    exit_layer: int | None = Field(
        None, ge=1, description="layerskip only: layers that the draft runs; unset: a quarter of them"
    )
    choices: Annotated[tuple[Cheaper, ...], Commas] = Field(
        ("skip", "int4", "window", "pages"),
        description="cheaper ways that drafts may run a sublayer: not at all, by a copy of its weights "
        "with 8 or 4 bits each, or with attention to few keys (first and newest pages; also the pages looked at most)",
    )
    extra_weight_bytes: int | None = Field(
        None, ge=0, description="the most that copies of weights for drafts may take in each process; unset: no bound"
    )
    skip: Annotated[tuple[int, ...], Commas] = Field((), description="static only: sublayers the draft leaves out")
    static_choice: Choice = Field("full", description="static only: how the draft runs the others")
    gate: bool = Field(True, description="turn drafting off where it is measured not to pay")
    optimise_share: float = Field(0.02, ge=0.0, le=1.0, description="share of the time for plan searches")
    warm_start: str | None = Field(
        None, description="file of saved plans: what self-sd and knn-ssd draft by, and knapspec and auto begin with"
    )

    @property
    def num_branch_tokens(self) -> int:
        """The most tokens that a draft of the strategy may have in branches; 0 if its drafts are chains."""
        return MAX_TREE_TOKENS if self.strategy in ("lookahead", "swift") else 0

    @field_validator("strategy")
    @classmethod
    def _known(cls, strategy: str) -> str:
        known = get_args(Strategy)
        if strategy in known or re.fullmatch(r"[\w.]+:\w+", strategy):
            return strategy
        near = difflib.get_close_matches(strategy, known, n=1)
        raise ValueError(
            f"choose one of {', '.join(known)}, or give 'module:name' of your own"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )

    @property
    def draft_choices(self) -> tuple[Choice, ...]:
        """The choices by which drafts of the strategy may run sublayers."""
        if self.strategy == "static":
            return combinations((weights_of(self.static_choice), keys_of(self.static_choice), SKIP))
        return combinations(self.choices if self.strategy in _CHOOSING else (SKIP,))

    @property
    def draft_weights(self) -> tuple[Weights, ...]:
        """The copies of weights that drafts of the strategy need, the smallest first."""
        wanted = {weights_of(choice) for choice in self.draft_choices}
        return tuple(weights for weights in QUANTISED_WEIGHTS if weights in wanted)

    @property
    def num_tap_tokens(self) -> int:
        """Number of tokens with a tap: their hidden states at all sublayer boundaries are kept for the strategy. With
        knn-ssd, this number is for each sequence."""
        if self.strategy in ("clasp", "knn-ssd"):
            return 1
        return self.num_search_tokens or (32 if self.strategy == "swift" else 8)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        needed, useful = {"self-sd", "knn-ssd"}, {"self-sd", "knn-ssd", "knapspec", "auto"}
        if self.warm_start is None and self.strategy in needed:
            raise ValueError(f"strategy {self.strategy!r} needs option 'warm_start': name a file of saved plans")
        if self.warm_start is not None and self.strategy not in useful:
            raise ValueError(f"option 'warm_start' does not work with strategy {self.strategy!r}: remove one")
        if self.corpus is not None and (self.strategy != "auto" or not self.corpus_tokens):
            raise ValueError(
                f"option 'corpus' is {self.corpus!r}, which works with strategy 'auto' and corpus_tokens above 0 only: "
                "remove it, or change these"
            )
        for name, is_given in (("skip", bool(self.skip)), ("static_choice", self.static_choice != FULL)):
            if is_given and self.strategy != "static":
                raise ValueError(
                    f"option {name!r} works with strategy 'static' only, not {self.strategy!r}: remove one"
                )
        if self.static_choice == SKIP:
            raise ValueError("option 'static_choice' is 'skip', which leaves no draft: name sublayers in 'skip'")
        if self.strategy == "static" and not self.skip and self.static_choice == FULL:
            raise ValueError(
                "strategy 'static' needs option 'skip', the sublayers that drafts leave out, or 'static_choice': name "
                "them, or choose strategy 'knapspec', which finds them"
            )
        return self


class ParallelOptions(Options):
    """The model in several processes: Ray actors hold pipeline stages of `tensor` ranks each, in `replicas` copies.

    layers: number of decoder layers of each stage; None divides the layers by time and memory.
    cohorts: batches of sequences under way at the same time, so that stages do not wait for one another.
    labels: labels that the nodes of shards must have, as {"ray.io/accelerator-type": "H100"}. topology: how Ray places
    stages with respect to a label of nodes, as {"ray.io/gpu-domain": "STRICT_PACK"}; it replaces `placement`, which is
    PACK if neither is given.
    """

    stages: int = Field(1, ge=1, description="pipeline stages the model is cut into")
    tensor: int = Field(1, ge=1, description="tensor-parallel ranks of each stage")
    replicas: int = Field(1, ge=1, description="copies of the whole model")
    layers: Annotated[tuple[int, ...] | None, Commas] = Field(
        None, description="decoder layers of each stage; unset: by time and memory"
    )
    cohorts: int | None = Field(None, ge=1, description="batches under way at once; unset: 2 a stage, 1 for one stage")
    placement: Placement | None = Field(None, description="how Ray places a replica's shards on nodes; unset: PACK")
    labels: dict[str, str] = Field(default_factory=dict)
    topology: dict[str, Placement] | None = None
    cpus_per_shard: float = Field(1.0, ge=0.0, description="Ray CPUs reserved for a shard, and its torch threads")
    gpus_per_shard: float | None = Field(
        None, ge=0.0, description="GPUs of a shard; below 1: shared; unset: one on CUDA"
    )
    data_plane: DataPlane = Field(
        "auto", description="hidden states in encrypted frames, or by NCCL (gloo on CPU); auto: NCCL between GPUs"
    )
    max_restarts: int = Field(3, ge=0, description="times a replica is brought back before its requests fail")
    heartbeat_timeout_s: float = Field(10.0, gt=0.0, description="seconds of silence after which a shard is dead")
    start_timeout_s: float = Field(600.0, gt=0.0, description="seconds to place, load and connect all shards")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.layers is not None and (len(self.layers) != self.stages or min(self.layers) < 1):
            raise ValueError(f"option 'layers' is {self.layers}: name {self.stages} numbers of layers, each 1 or more")
        if self.topology and self.placement is not None:
            raise ValueError(f"option 'placement' is {self.placement!r} together with 'topology': give one of them")
        return self

    @property
    def num_cohorts(self) -> int:
        return self.cohorts or (2 * self.stages if self.stages > 1 else 1)

    @property
    def num_cpus(self) -> float:
        """Ray CPUs that all shards reserve. 0 where replicas have no shards: they take the CPUs that there are."""
        if self.replicas > 1 and self.stages * self.tensor == 1:
            return 0.0
        return self.replicas * self.stages * self.tensor * self.cpus_per_shard


class OffloadOptions(Options):
    """Weights that do not fit the device stay in CPU memory or on disk and are fetched whenever they are needed.

    sublayers: their numbers in the whole model. None: `share` of the weights, MLPs from the middle of the model
    outwards, which drafts can skip with the least loss. A draft that skips all offloaded sublayers fetches nothing.
    """

    to: Literal["cpu", "disk"] = "disk"
    share: float = Field(0.5, gt=0.0, lt=1.0, description="of the sublayers' bytes, where `sublayers` are not named")
    sublayers: tuple[int, ...] | None = None
    folder: str | None = Field(None, description="for the file on disk; unset: the system's for temporary files")


# On a CPU, on a GPU, and on a large GPU.
_MAX_NUM_SEQS, _MAX_NUM_BATCHED_TOKENS = (8, 64, 256), (1024, 4096, 8192)
LARGE_GPU_BYTES = 70 * 2**30


class EngineConfig(Options):
    """Options of one engine: its model, device, capacity and speculation. It takes names of vLLM's (`vllm_names`)."""

    model: str = Field(description="folder, GGUF file, Hugging Face hub id such as Qwen/Qwen3-8B, smollm2 or demo")
    tokenizer: str | None = Field(None, description="folder or hub id; unset: the model's own")
    revision: str | None = Field(None, description="branch, tag or commit on the hub; unset: the default branch")
    trust_remote_code: bool = Field(False, description="run the Python code that comes with the checkpoint")
    dtype: Annotated[DType, BeforeValidator(_spelled)] = Field("auto", description="data type of the weights")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, ...")
    num_threads: int | None = Field(
        None, ge=1, le=4096, description="CPU threads; unset: OMP_NUM_THREADS, or as measured at load"
    )
    quantization_config: dict[str, Any] | None = None
    lora_modules: Annotated[dict[str, str], Pairs] = Field(
        default_factory=dict, description="NAME=FOLDER of a LoRA adapter of peft, for requests that name it; repeatable"
    )
    adapter: str | None = Field(None, description="name in lora_modules, for requests that name no adapter")
    generation_config: OfCheckpoint = Field(
        "auto", description="sampling defaults and rules of the checkpoint's generation_config.json; none: ignore them"
    )
    tool_call_parser: ToolCallParser | None = Field(
        None, description="format of tool calls in chat; unset: the one that the chat template asks for"
    )
    reasoning_parser: ReasoningParser | None = Field(
        None,
        description="format of reasoning in chat, which then is apart from the content; unset: only that of gpt-oss",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="most tokens of prompt and output; unset: the model's own"
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="sequences decoded at once; unset: 8 on a CPU, 64 on a GPU, 256 on one from 70 GiB up",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=16,
        le=2**30,
        description="prompt tokens run between two decode rounds; unset: 1024 on a CPU, 4096 on a GPU, 8192 on one "
        "from 70 GiB up",
    )
    kv_cache_tokens: int | None = Field(
        None, ge=16, le=2**40, description="tokens the KV cache holds; unset: from free memory"
    )
    kv_cache_share: float | None = Field(
        None, gt=0, le=1, description="share of the free memory for the KV cache; unset: 0.8 of a GPU's, else 0.25"
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of a GPU's memory for model and KV cache; kv_cache_share and kv_cache_tokens override it",
    )
    enable_prefix_caching: bool = Field(True, description="sequences that begin alike share keys and values")
    deterministic: bool = Field(False, description="fixed kernel shapes: same tokens in bf16 whatever the batch")
    own_bits: bool = Field(
        False, description="on a CPU, decode a 4-bit checkpoint by its own bits: faster, but rounded as in bfloat16"
    )
    cuda_kernels: CudaKernels = Field("auto", description="Triton kernels on a GPU where they work; off: plain PyTorch")
    cuda_graphs: CudaGraphs = Field(
        "auto", description="on a GPU, launches captured once and replayed: a graph for each pass; auto: where possible"
    )
    speculation: SpeculationOptions = SpeculationOptions()
    offload: OffloadOptions | None = Field(None, description="unset: all weights on the device")
    parallel: ParallelOptions | None = Field(None, description="unset: the whole model in the engine's own process")
    remeasure: bool = Field(False, description="measure the latency profile anew, even if a saved one fits")
    profile_cache: str | None = Field(None, description="folder of saved latency profiles; unset: the user's cache")

    def __init__(self, **values: Any) -> None:
        with naming_given(values):
            super().__init__(**from_vllm(values, ENGINE, type(self).model_fields))

    @field_validator("cuda_kernels", "cuda_graphs", mode="before")
    @classmethod
    def _words_of_yaml(cls, value: Any) -> Any:
        if value in ("plans", "sublayers"):
            raise ValueError(f"option 'cuda_graphs' {value!r} is gone: use on, which serves every plan, or auto")
        return {False: "off", True: "on"}[value] if isinstance(value, bool) else value  # YAML reads on and off as bool

    @field_validator("parallel", mode="before")
    @classmethod
    def _layout_is_a_mapping(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError("give a mapping such as {'stages': 2}; only LLM(...) takes 'auto'")  # noqa: TRY004
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.offload is not None and self.parallel is not None and self.parallel.tensor > 1:
            raise ValueError(
                f"option 'offload' does not work with option 'tensor' {self.parallel.tensor}: shares of weights are "
                "not fetched; use more stages instead of ranks"
            )
        if self.adapter is not None and self.adapter not in self.lora_modules:
            known = ", ".join(map(repr, self.lora_modules)) or "none"
            raise ValueError(f"option 'adapter' is {self.adapter!r}: name one of 'lora_modules' ({known})")
        if self.lora_modules and (self.offload is not None or (self.parallel is not None and self.parallel.tensor > 1)):
            raise ValueError(
                f"option 'lora_modules' does not work with option {'tensor' if self.offload is None else 'offload'!r}: "
                "leave one out, or merge the adapter into the model with merge_and_unload() of peft"
            )
        if self.own_bits and self.deterministic:
            raise ValueError("option 'own_bits' does not work with option 'deterministic': leave one out")
        if self.cuda_graphs == "on" and self.cuda_kernels == "off":
            raise ValueError("option 'cuda_graphs' 'on' does not work with option 'cuda_kernels' 'off': choose auto")
        return self

    def sized(self, gpu_bytes: int | None) -> Self:
        """Return the config with numbers where `max_num_seqs` and `max_num_batched_tokens` are unset. gpu_bytes: memory
        of the GPU that runs the engine; None: it runs on a CPU."""
        size = 0 if gpu_bytes is None else 2 if gpu_bytes >= LARGE_GPU_BYTES else 1
        return self.replace(
            max_num_seqs=self.max_num_seqs or _MAX_NUM_SEQS[size],
            max_num_batched_tokens=self.max_num_batched_tokens or _MAX_NUM_BATCHED_TOKENS[size],
        )

    @property
    def num_seqs(self) -> int:
        """`max_num_seqs`. If it is unset, and it is not known which GPU runs the engine (see `sized`), the default of a
        small one where `device`, or this machine, has a GPU."""
        return self.max_num_seqs or _MAX_NUM_SEQS[self._is_on_gpu]

    @property
    def num_batched_tokens(self) -> int:
        """`max_num_batched_tokens`, or a default as in `num_seqs`."""
        return self.max_num_batched_tokens or _MAX_NUM_BATCHED_TOKENS[self._is_on_gpu]

    @property
    def _is_on_gpu(self) -> bool:
        return has_gpu() if self.device == "auto" else self.device.startswith("cuda")

    @property
    def num_tap_tokens(self) -> int:
        """Number of tokens with a tap (see SpeculationOptions), over all sequences."""
        speculation = self.speculation
        return speculation.num_tap_tokens * (self.num_seqs if speculation.strategy == "knn-ssd" else 1)


class EngineKeywords(TypedDict, total=False):
    """The keywords of `LLM(model, ...)`: the options of `EngineConfig` except `model`. Groups may be mappings.

    parallel: "auto" takes the layout that `rayspec plan` recommends.
    """

    tokenizer: str | None
    revision: str | None
    trust_remote_code: bool
    dtype: DType
    device: str
    num_threads: int | None
    quantization_config: dict[str, Any] | None
    lora_modules: dict[str, str]
    adapter: str | None
    generation_config: OfCheckpoint
    tool_call_parser: ToolCallParser | None
    reasoning_parser: ReasoningParser | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    kv_cache_tokens: int | None
    kv_cache_share: float | None
    gpu_memory_utilization: float | None
    enable_prefix_caching: bool
    deterministic: bool
    own_bits: bool
    cuda_kernels: CudaKernels
    cuda_graphs: CudaGraphs
    speculation: SpeculationOptions | Mapping[str, Any]
    offload: OffloadOptions | Mapping[str, Any] | None
    parallel: ParallelOptions | Mapping[str, Any] | Literal["auto"] | None
    remeasure: bool
    profile_cache: str | None


_DECIDING = (
    *("model", "tokenizer", "revision", "generation_config", "dtype", "quantization_config", "lora_modules"),
    *("adapter", "tool_call_parser", "reasoning_parser", "max_model_len", "deterministic", "own_bits"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of the engine and the sampling parameters of every request."""

    engine: EngineConfig
    sampling: SamplingParams

    def resolved(self, engine: EngineConfig | None = None) -> dict[str, Any]:
        """Return the options as plain values of a config file. engine: the config of the running engine, if any.

        The model has the name that the user gave, and `parallel` the value: the engine may be one of a pool.
        """
        asked = self.engine.model_dump(mode="json")
        options = asked if engine is None else engine.model_dump(mode="json")
        asked = {"model": asked["model"], "parallel": asked["parallel"]}
        return options | asked | {"sampling": self.sampling.model_dump(mode="json")}

    @property
    def deciding(self) -> dict[str, Any]:
        """The engine options that decide the text of an output. Options of speed are not among them."""
        engine = self.engine.model_dump(mode="json")
        return {name: engine[name] for name in _DECIDING} | {"verification": engine["speculation"]["verification"]}
