import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers.pre_tokenizers import Digits
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import rayspec.model.gguf
from rayspec import LLM, SamplingParams, demo
from rayspec.config import EngineConfig
from rayspec.decode.generation_config import eos_token_ids
from rayspec.model.gguf import find_gguf, located
from rayspec.model.sizes import quantisation_of
from rayspec.model.weights import load_config, load_model, load_tokenizer, weights_fingerprint
from rayspec.ops.doctor.machine import check_weights
from rayspec.types import CheckpointError, ConfigError
from tests.families import build
from tests.gguf_files import write_gguf

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "phi3")
PROMPTS = [{"prompt_token_ids": [7 * n + k for n in range(1, 21)]} for k in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of each family."""
    folder = tmp_path_factory.mktemp("gguf")
    for family in FAMILIES:
        head_dim = 128 if family == "qwen3" else 16  # transformers does not read the field for qwen3
        model = build(family, vocab_size=2048, head_dim=head_dim)
        write_gguf(model, folder / f"{family}.gguf", head=None if model.config.tie_word_embeddings else "Q4_0")
    return folder


def _config(path: Path, **options: str) -> EngineConfig:
    return EngineConfig(model=str(path), device="cpu", **{"dtype": "float32", **options})  # type: ignore[arg-type]


def _by_transformers(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_loads_as_transformers_loads_it(folder: Path, family: str) -> None:
    path = folder / f"{family}.gguf"
    expected, model = _by_transformers(path).state_dict(), load_model(_config(path))
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert quantisation_of(_config(path), model.config, on_cpu=False) is None
    assert [one.found for one in check_weights(str(path))] == ["GGUF: become plain matrices at load"]


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # tied and not
def test_a_span_reads_only_its_own_tensors(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sizes = folder / f"{family}.gguf", []
    own = gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", lambda data, kind: sizes.append(data.nbytes) or own(data, kind))  # type: ignore[func-returns-value]
    whole = load_model(_config(path))
    num_bytes_of_all = sum(sizes)
    for layers in (range(2), range(2, 4)):
        sizes.clear()
        span = load_model(_config(path), layers=layers)
        for name, tensor in span.state_dict().items():
            assert torch.equal(tensor, whole.state_dict()[name]), name
        assert sum(sizes) < 0.8 * num_bytes_of_all


def test_drafts_do_not_change_what_generate_writes(folder: Path) -> None:
    path = folder / "llama.gguf"
    model = _by_transformers(path)
    llm = LLM(str(path), dtype="float32", num_threads=1, speculation={"strategy": "lookup"})
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True), use_tqdm=False)
    llm.shutdown()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = torch.tensor([prompt["prompt_token_ids"]])
        written = model.generate(tokens, do_sample=False, max_new_tokens=24, eos_token_id=None)  # type: ignore[operator]
        assert list(output.outputs[0].token_ids) == written[0, 20:].tolist()


def test_loading_says_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    load_model(_config(folder / "llama.gguf", dtype="bfloat16"))
    assert caplog.messages == ["loading llama.gguf: 0.00 GiB become 0.00 GiB in bfloat16"]
    assert "".join(capfd.readouterr()) == "", "neither a bar of transformers nor its advice"


def test_tokenizer_and_chat_template_come_from_the_file(folder: Path) -> None:
    own, tokenizer = AutoTokenizer.from_pretrained(demo.model_path()), load_tokenizer(_config(folder / "llama.gguf"))
    text = "The audit of 2024 found <|document|> nothing."
    assert tokenizer.encode(text) == own.encode(text)
    chat = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == own.apply_chat_template(chat, tokenize=False)


def _of(tmp_path: Path, **fields: Any) -> Path:
    """A file with these fields of its tokenizer."""
    named = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return write_gguf(build("llama", vocab_size=2048, head_dim=16), tmp_path / "model.gguf", fields=named)


def test_each_digit_is_a_word_where_the_file_says_so(folder: Path, tmp_path: Path) -> None:
    own, other = load_tokenizer(_config(_of(tmp_path, pre="smollm"))), load_tokenizer(_config(folder / "llama.gguf"))
    digits = Digits(individual_digits=True)
    for text in ("a   12", "$1.5", "of  3 and 2024"):
        parts = [part for part, _ in digits.pre_tokenize_str(text)]
        assert own.encode(text) == [token for part in parts for token in other.encode(part)]
    assert own.encode("a   12") != other.encode("a   12")


def test_texts_of_llama_3_begin_with_the_bos_token_unless_the_file_says_no(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_config(_of(tmp_path, pre="llama-bpe")))
    assert tokenizer.encode("The audit")[0] == 1
    assert tokenizer.backend_tokenizer.model.ignore_merges  # type: ignore[attr-defined]
    assert load_tokenizer(_config(_of(tmp_path, pre="llama-bpe", add_bos_token=False))).encode("The audit")[0] != 1


def test_a_control_token_of_any_characters_is_one_token(tmp_path: Path) -> None:
    own = AutoTokenizer.from_pretrained(demo.model_path())
    tokens = own.convert_ids_to_tokens(list(range(len(own))))
    user, begin = tokens[2], tokens[3] = "<\uff5cUser\uff5c>", "<\uff5cbegin\u2581of\u2581text\uff5c>"  # as DeepSeek's
    kinds = [3 if number < 6 else 1 for number in range(len(tokens))]
    tokenizer = load_tokenizer(_config(_of(tmp_path, tokens=tokens, token_type=kinds, bos_token_id=3)))
    assert len(tokenizer) == len(tokens)
    assert tokenizer.bos_token_id == 3
    audit = own.encode("The audit")
    assert tokenizer.encode(f"{begin}{user}The audit<|user|>") == [3, 2, *audit, 4]
    assert tokenizer.decode([2, *audit], skip_special_tokens=True) == "The audit"


def test_an_unknown_way_to_split_texts_is_refused_and_none_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _of(tmp_path, pre="deepseek-llm")
    with pytest.raises(CheckpointError, match=r"pre = 'deepseek-llm', unknown: set option 'tokenizer'"):
        load_tokenizer(_config(path))
    assert load_tokenizer(_config(path, tokenizer=str(demo.model_path())))
    load_tokenizer(_config(_of(tmp_path, pre="default")))
    assert "model.gguf does not say how it splits texts" in caplog.text


def test_a_text_ends_also_at_the_token_that_ends_an_answer(folder: Path, tmp_path: Path) -> None:
    path = _of(tmp_path, eot_token_id=77)
    assert eos_token_ids(_config(path)) == (1, 77)
    assert load_model(_config(path)).generation_config.eos_token_id == [1, 77], "for generate, too"
    assert eos_token_ids(_config(folder / "llama.gguf")) == (1,)


def test_a_folder_with_one_file_is_a_checkpoint_and_with_several_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "qwen2.gguf", tmp_path)
    assert load_config(_config(tmp_path)).model_type == "qwen2"
    with pytest.raises(ConfigError, match=r"several GGUF files \(gemma3_text\.gguf, llama\.gguf"):
        load_config(_config(folder))


def test_dtype_auto_is_that_of_the_matrices(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(build("qwen2", vocab_size=2048), tmp_path / "half.gguf", matrices="F16")
    assert load_model(_config(path, dtype="auto")).dtype == torch.float16
    assert load_model(_config(folder / "qwen2.gguf", dtype="auto")).dtype == torch.bfloat16


def test_a_file_that_was_replaced_is_read_again(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(folder / "llama.gguf", path)
    before = weights_fingerprint(_config(path))
    assert load_config(_config(path)).model_type == "llama"
    shutil.copy(folder / "phi3.gguf", path)
    assert load_config(_config(path)).model_type == "phi3"
    assert weights_fingerprint(_config(path)) != before


def test_damaged_files_are_refused(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "llama.gguf").read_bytes()
    for number, content in enumerate((b"", b"GGUF", whole[:5000], whole[:-5000], b"x" * 5000)):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=path.name):
            load_model(_config(path))


@pytest.mark.parametrize(
    ("array", "problem"),
    [(struct.pack("<IQ", 0, 2**60), "it ends before"), (2000 * struct.pack("<IQ", 9, 1), "maximum recursion depth")],
    ids=["endless", "nested"],
)
@pytest.mark.timeout(20)
def test_an_array_takes_no_more_than_its_bytes(array: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 9) + array)
    with pytest.raises(CheckpointError, match=problem):
        load_model(_config(path))


_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
_LONG = {"rope_type": "longrope", "long_factor": [1.0, 2.0, 4.0, 8.0], "short_factor": [1.0, 1.1, 1.2, 1.3]}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("phi3", {"sliding_window": 6, "partial_rotary_factor": 0.5}),
        ("phi3", {"original_max_position_embeddings": 12, "rope_parameters": _LONG | {"rope_theta": 1e4}}),
        ("starcoder2", {"sliding_window": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("qwen3", {}),  # heads of 16 dimensions, and not of the family's 128
        ("qwen2", {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 8192}}),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("qwen2", {"rope_parameters": _YARN | {"original_max_position_embeddings": 512}}),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
        ),
    ],
)
def test_the_text_is_that_of_the_model_also_where_transformers_does_not_read_a_field(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = build(family, vocab_size=2048, head_dim=16, **changes)
    loaded = load_model(_config(write_gguf(model, tmp_path / "model.gguf", matrices="F32")))
    tokens = torch.tensor([PROMPTS[0]["prompt_token_ids"]])
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


def test_soft_caps_are_those_of_the_file(tmp_path: Path) -> None:
    caps = {"attn_logit_softcapping": 7.0, "final_logit_softcapping": 5.0}
    model = build("gemma2", vocab_size=2048, head_dim=16, tie_word_embeddings=True, **caps)
    found = load_config(_config(write_gguf(model, tmp_path / "model.gguf")))
    assert (found.attn_logit_softcapping, found.final_logit_softcapping) == (7, 5)


def test_biases_that_transformers_does_not_read_are_refused(tmp_path: Path) -> None:
    path = write_gguf(build("llama", vocab_size=2048, head_dim=16, attention_bias=True), tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="such as biases, that transformers does not read"):
        load_model(_config(path))


def test_a_block_that_predicts_further_tokens_is_left_out(tmp_path: Path) -> None:
    model = build("llama", vocab_size=2048, head_dim=16)
    model.config.num_hidden_layers = 3
    assert "model.layers.3.mlp.up_proj.weight" in model.state_dict()
    loaded = load_model(_config(write_gguf(model, tmp_path / "model.gguf", matrices="F32")))
    assert len(loaded.model.layers) == 3


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope.scaling.type": "yarn"}, "llama.rope.scaling.type = yarn"),
        ({"logit_scale": 0.0625}, "llama.logit_scale = 0.0625"),
        ({"attention.causal": False}, "llama.attention.causal = False"),
        ({"of_next_year": 3}, "llama.of_next_year = 3"),
    ],
)
def test_a_field_that_nobody_reads_is_refused(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = write_gguf(build("llama", vocab_size=2048), tmp_path / "llama.gguf", fields=fields)
    with pytest.raises(CheckpointError, match=f"llama.gguf has {named}, which is not read .* in safetensors"):
        load_config(_config(path))


def test_other_threads_read_whole_files_meanwhile(folder: Path) -> None:
    path = folder / "llama.gguf"
    with located(str(path), wanted=lambda name: False), ThreadPoolExecutor(1) as other:
        assert gguf.GGUFReader(path).tensors == []
        assert len(other.submit(gguf.GGUFReader, path).result().tensors) > 0
        assert len(gguf.GGUFReader(folder / "phi3.gguf").tensors) > 0, "another file"
    assert len(gguf.GGUFReader(path).tensors) > 0


def test_an_architecture_that_transformers_does_not_read_is_refused(folder: Path, tmp_path: Path) -> None:
    content = (folder / "llama.gguf").read_bytes().replace(b"llama", b"hyena")
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"architecture hyena is not supported yet: use the checkpoint in safet"):
        load_config(_config(tmp_path / "model.gguf"))


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big-00001-of-00003.gguf"
    path.touch()
    with pytest.raises(ConfigError, match="llama-gguf-split --merge"):
        load_config(_config(path))


def test_a_file_in_the_cache_of_the_hub_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refs, file = (tmp_path / "models--org--name" / part for part in ("refs/main", "snapshots/c0ffee/a/m.gguf"))
    for each in (refs, file):
        each.parent.mkdir(parents=True)
        each.write_text("c0ffee")
    assert find_gguf("org/name:a/m.gguf") == file


def test_without_the_package_its_name_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rayspec.model.gguf, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[gguf\]'"):
        load_config(_config(folder / "llama.gguf"))


def test_a_model_too_large_for_memory_is_refused_unread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rayspec.model.gguf, "bytes_available", lambda: 1000)
    with pytest.raises(CheckpointError, match=r"0\.0 GiB of memory are free: choose a smaller data type"):
        load_model(_config(folder / "llama.gguf"))
