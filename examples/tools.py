"""Let a model call a function, and answer with its result, at an endpoint: python examples/tools.py [URL [MODEL]]

It needs openai. The model's chat template must describe tools, as that of Qwen 3 does. The bundled model's does not.
"""

import json
import os
import sys

from openai import BadRequestError, OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
model = sys.argv[2] if len(sys.argv) > 2 else client.models.list().data[0].id


def budget(agency: str, year: int) -> str:
    return f"The {agency} spent {year % 100} million dollars in {year}."


parameters = {
    "type": "object",
    "properties": {
        "agency": {"enum": ["Parks Council", "Water Board"]},
        "year": {"type": "integer", "minimum": 2000, "maximum": 2030},
    },
    "required": ["agency", "year"],
}
tools = [{"type": "function", "function": {"name": "budget", "strict": True, "parameters": parameters}}]
messages = [{"role": "user", "content": "What did the Parks Council spend in 2021?"}]

# The first answer must be a call. "auto" leaves it to the model, if the model's chat template describes tools.
for choice in ("required", "none"):
    try:
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=150,
            temperature=0.0,
        )
    except BadRequestError as error:
        sys.exit(f"{model}: {error.body['message']}. Serve a model whose chat template describes tools, as Qwen 3's.")
    message = answer.choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        result = budget(**json.loads(call.function.arguments))
        print(f"{call.function.name}({call.function.arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
