"""Clients of other makers against a real endpoint. Tests are skipped where their package is not installed:
pip install langchain-openai instructor litellm "lm-eval[api]" "pydantic-ai-slim[openai]" openai-agents"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

import rayspec
from rayspec import SamplingParams, demo
from tests.serve.endpoint_process import EndpointProcess

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.exhaustive]

QUESTION = "What did the Parks Council spend in 2021?"
ASKED: Any = [{"role": "user", "content": QUESTION}]
SPENT = "21 million dollars"
Agency = Literal["Parks Council", "Water Board"]
Year = Literal[2020, 2021]


class Budget(pydantic.BaseModel):
    """The budget of an agency in a year."""

    model_config = pydantic.ConfigDict(extra="forbid")

    agency: Agency
    year: Year


def budget(agency: Agency, year: Year) -> str:
    """Return what an agency spent in a year."""
    return SPENT


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"no {package} here")


@pytest.fixture
def url(demo_endpoint: EndpointProcess, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it asks the internet for prices otherwise
    return f"{demo_endpoint.url}/v1"


@pytest.fixture
def answer(url: str) -> str:
    """What OpenAI's client gets."""
    create = openai.OpenAI(base_url=url).chat.completions.create
    return create(model="tools", messages=ASKED, temperature=0, max_tokens=24).choices[0].message.content or ""


@needs("langchain_openai")
class TestLangChain:
    @pytest.fixture
    def chat(self, url: str) -> Any:
        package = importlib.import_module("langchain_openai")
        return package.ChatOpenAI(model="tools", base_url=url, temperature=0, max_tokens=200, max_retries=0)

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_structured_output(self, chat: Any, method: str) -> None:
        assert isinstance(chat.with_structured_output(Budget, method=method).invoke(QUESTION), Budget)

    @pytest.mark.parametrize("by_responses", [False, True])
    def test_a_loop_with_tools(self, chat: Any, by_responses: bool) -> None:
        messages = importlib.import_module("langchain_core.messages")
        chat = chat.model_copy(update={"use_responses_api": by_responses})
        bound = chat.bind_tools([budget], tool_choice="budget")
        first = bound.invoke(QUESTION)
        (call,) = first.tool_calls
        assert (call["name"], sorted(call["args"])) == ("budget", ["agency", "year"])
        pieces = list(bound.stream(QUESTION))
        assert len(pieces) > 2
        streamed = sum(pieces[1:], pieces[0])
        assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [(call["name"], call["args"])]
        history = [messages.HumanMessage(QUESTION), first, messages.ToolMessage(SPENT, tool_call_id=call["id"])]
        assert chat.bind_tools([budget]).invoke(history).text


@needs("instructor")
class TestInstructor:
    @pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "RESPONSES_TOOLS", "JSON_SCHEMA"])
    def test_modes_whose_form_is_enforced(self, url: str, mode: str) -> None:
        assert isinstance(_instructed(url, mode, Budget), Budget)

    def test_modes_that_describe_the_schema_in_the_prompt_only(self, url: str) -> None:
        """The bundled model does not follow a description. So any object is right, or the request has a form."""
        fields: Any = {"year": (Year | None, None)}
        any_object = pydantic.create_model("Any", **fields)
        assert isinstance(_instructed(url, "JSON", any_object, temperature=1, seed=0), any_object)
        form = {"guided_json": Budget.model_json_schema()}
        assert isinstance(_instructed(url, "MD_JSON", Budget, extra_body=form), Budget)


def _instructed(url: str, mode: str, model: Any, **more: Any) -> Any:
    package = importlib.import_module("instructor")
    client = package.from_openai(openai.OpenAI(base_url=url, max_retries=0), mode=package.Mode[mode])
    length = {"max_output_tokens" if mode.startswith("RESPONSES") else "max_tokens": 300}
    asked = {"messages": ASKED, "response_model": model, "max_retries": 0, "temperature": 0} | length | more
    return client.create(model="tools", **asked)


@needs("litellm")
class TestLiteLLM:
    @pytest.fixture
    def ask(self, url: str) -> Any:
        package = importlib.import_module("litellm")

        def ask(provider: str, **options: Any) -> Any:
            asked = {"messages": ASKED, "temperature": 0, "max_tokens": 200, "num_retries": 0} | options
            return package.completion(model=f"{provider}/tools", api_base=url, api_key="none", **asked)

        return ask

    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
    def test_text_forms_and_tools(self, ask: Any, answer: str, provider: str) -> None:
        assert ask(provider, max_tokens=24).choices[0].message.content == answer
        pieces = [one.choices[0].delta.content or "" for one in ask(provider, max_tokens=24, stream=True)]
        assert (len(pieces) > 2, "".join(pieces)) == (True, answer)
        Budget.model_validate_json(ask(provider, response_format=Budget).choices[0].message.content)
        function = {"name": "budget", "parameters": Budget.model_json_schema()}
        tools: Any = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        (call,) = ask(provider, parallel_tool_calls=False, **tools).choices[0].message.tool_calls
        Budget.model_validate_json(call.function.arguments)

    def test_responses(self, url: str, answer: str) -> None:
        package = importlib.import_module("litellm")
        whole = package.responses(
            model="openai/tools", input=QUESTION, api_base=url, api_key="none", temperature=0, max_output_tokens=24
        )
        assert whole.output[0].content[0].text == answer


@needs("pydantic_ai")
class TestPydanticAI:
    @pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
    def model(self, url: str, request: pytest.FixtureRequest) -> Any:
        models = importlib.import_module("pydantic_ai.models.openai")
        provider = importlib.import_module("pydantic_ai.providers.openai").OpenAIProvider(base_url=url, api_key="none")
        settings = {"temperature": 0, "max_tokens": 300, "parallel_tool_calls": False}
        return getattr(models, request.param)("tools", provider=provider, settings=settings)

    @pytest.mark.parametrize("is_native", [False, True])
    def test_typed_output(self, model: Any, is_native: bool) -> None:
        package = importlib.import_module("pydantic_ai")
        agent = package.Agent(model, output_type=package.NativeOutput(Budget) if is_native else Budget, retries=0)
        assert isinstance(agent.run_sync(QUESTION).output, Budget)

        async def streamed() -> Any:
            async with agent.run_stream(QUESTION) as result:
                return await result.get_output()

        assert isinstance(asyncio.run(streamed()), Budget)


@needs("agents")
class TestOpenAIAgents:
    @pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
    def test_a_loop_with_a_tool_and_a_typed_output(self, url: str, kind: str) -> None:
        package = importlib.import_module("agents")
        package.set_tracing_disabled(True)
        called = list[str]()

        # The model may call once, and must then answer.
        @package.function_tool(is_enabled=lambda context, agent: not called)  # type: ignore[untyped-decorator]
        def spending(agency: Agency, year: Year) -> str:
            """Return what an agency spent in a year."""
            called.append(f"{agency} in {year}")
            return SPENT

        async def both() -> tuple[Any, Any]:
            client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
            agent = package.Agent(
                name="clerk",
                model=getattr(package, kind)(model="tools", openai_client=client),
                tools=[spending],
                output_type=Budget,
                model_settings=package.ModelSettings(
                    temperature=0, max_tokens=300, tool_choice="required", parallel_tool_calls=False
                ),
            )
            whole = await package.Runner.run(agent, QUESTION, max_turns=3)
            first = called.pop()
            streamed = package.Runner.run_streamed(agent, QUESTION, max_turns=3)
            types = [one.type async for one in streamed.stream_events()]
            assert ("raw_response_event" in types, called) == (True, [first])
            return whole.final_output, streamed.final_output

        whole, streamed = asyncio.run(both())
        assert isinstance(whole, Budget)
        assert streamed == whole


@needs("lm_eval")
class TestLMEval:
    def test_every_kind_of_task_has_the_models_own_numbers(self, url: str, llm: rayspec.LLM, tmp_path: Path) -> None:
        package = importlib.import_module("lm_eval")
        texts, choices = (
            ("The agency spent", "In 2011 the department paid"),
            ["40 million dollars.", "five blue moons."],
        )
        rows = [json.dumps({"text": text, "choices": choices}) for text in texts]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
        shared: Any = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{text}}",
            "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": 12, "temperature": 0},
        }
        tasks = [
            {"task": "score", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "0"},
            {"task": "write", "output_type": "generate_until"},
            {"task": "roll", "output_type": "loglikelihood_rolling", "doc_to_text": ""},
        ]
        metrics = {"score": "acc", "write": "exact_match", "roll": "word_perplexity"}
        model = {"base_url": f"{url}/completions", "model": "tools", "tokenizer": str(demo.model_path())}
        found = package.simple_evaluate(
            model="local-completions",
            model_args=model | {"num_concurrent": 2, "max_length": 512, "max_retries": 1},
            tasks=[shared | {"metric_list": [{"metric": metrics[one["task"]]}]} | one for one in tasks],
            bootstrap_iters=0,
            batch_size=2,
            log_samples=True,
        )["samples"]
        answers = llm.generate(list(texts), SamplingParams(temperature=0, max_tokens=12))
        assert [one["resps"][0][0] for one in found["write"]] == [one.outputs[0].text for one in answers]
        ids = [list(llm.tokenizer(text)["input_ids"]) for text in texts]
        scores = [[_score(llm, before, f" {choice}") for choice in choices] for before in ids]
        assert [[float(part[0][0]) for part in one["resps"]] for one in found["score"]] == [
            pytest.approx(row, abs=1e-3) for row in scores
        ]
        scores = [_score(llm, [llm.tokenizer.eos_token_id], text) for text in texts]
        assert [float(one["resps"][0][0]) for one in found["roll"]] == pytest.approx(scores, abs=1e-3)


def _score(llm: rayspec.LLM, before: list[int], text: str) -> float:
    """The log-probability of the text after these tokens."""
    ids = [*before, *llm.tokenizer(text)["input_ids"]]
    (output,) = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, prompt_logprobs=0))
    rows = zip(ids, output.prompt_logprobs or (), strict=True)
    return sum(row[token].logprob for token, row in list(rows)[len(before) :] if row)
