"""Tools at a real endpoint, by OpenAI's client."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

import rayspec
from tests.serve.endpoint_process import EndpointProcess

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PARAMETERS = {
    "type": "object",
    "properties": {
        "agency": {"enum": ["Parks Council", "Water Board"]},
        "year": {"type": "integer", "minimum": 2000, "maximum": 2030},
    },
    "required": ["agency", "year"],
}
MESSAGES: Any = [{"role": "user", "content": "What did the Parks Council spend in 2021?"}]


class Year(pydantic.BaseModel):
    year: int = pydantic.Field(ge=2000, le=2030)


def test_a_loop_by_the_responses_api(demo_endpoint: EndpointProcess) -> None:
    client = openai.OpenAI(base_url=f"{demo_endpoint.url}/v1", api_key="none", timeout=60)
    asked: Any = {"model": "tools", "temperature": 0.0, "max_output_tokens": 100}
    tool: Any = {"type": "function", "name": "budget", "strict": True, "parameters": PARAMETERS}
    forced: Any = {"tools": [tool], "tool_choice": {"type": "function", "name": "budget"}}
    first = client.responses.create(input=MESSAGES, **asked, **forced)
    (call,) = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments).keys() == {"agency", "year"}
    with client.responses.stream(input=MESSAGES, **asked, **forced) as events:
        types = [event.type for event in events]
        (same,) = events.get_final_response().output
    assert "response.function_call_arguments.delta" in types
    assert same.type == "function_call"
    assert same.arguments == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 million dollars"}
    history = [*MESSAGES, call.model_dump(exclude={"parsed_arguments"}), result]
    last = client.responses.create(input=history, instructions="Be brief.", tools=[tool], **asked)
    assert last.output_text
    pieces = client.responses.create(input=history, instructions="Be brief.", tools=[tool], stream=True, **asked)
    assert "".join(one.delta for one in pieces if one.type == "response.output_text.delta") == last.output_text
    parsed = client.responses.parse(input="When?", text_format=Year, **asked)
    assert parsed.output_parsed is not None
    one: Any = {"tools": [tool], "parallel_tool_calls": False}
    ended = client.responses.parse(input=history, text_format=Year, **one, **asked)
    assert ended.output_parsed is not None or ended.output[0].type == "function_call"
    with pytest.raises(openai.BadRequestError, match="send the earlier input and output again") as caught:
        client.responses.create(input="And then?", previous_response_id=first.id, **asked)
    assert caught.value.param == "previous_response_id"


def test_the_example_runs(demo_endpoint: EndpointProcess) -> None:
    script = Path(rayspec.__file__).parents[1] / "examples" / "tools.py"
    done = subprocess.run(
        [sys.executable, script, demo_endpoint.url, "tools"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('budget({"agency": "')
    assert "million dollars in" in done.stdout.splitlines()[0]
    command = [sys.executable, script, demo_endpoint.url, "demo"]  # whose chat template has no tools
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "demo: messages.1.tool_calls: the model's chat template has no such field; leave it out. "
        "Serve a model whose chat template describes tools, as Qwen 3's.\n"
    )
