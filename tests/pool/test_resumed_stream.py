from __future__ import annotations

from rayspec.pool.resumed_stream import ResumedStream
from rayspec.types import CompletionOutput, RequestOutput


def test_what_was_told_is_not_told_again_in_whatever_pieces_it_comes() -> None:
    def piece(text: str, finished: bool = False) -> RequestOutput:
        one = CompletionOutput(
            index=0, text=text, token_ids=list(text.encode()), finish_reason="stop" if finished else None
        )
        return RequestOutput(request_id="r", prompt=None, prompt_token_ids=(), outputs=[one], finished=finished)

    first = ResumedStream()
    told = [first.new_part(piece("abc")), first.new_part(piece("de"))]
    second = first.again()
    told += [second.new_part(piece("a")), second.new_part(piece("bc")), second.new_part(piece("def"))]
    third = second.again()
    told += [third.new_part(piece("abcdefg")), third.last_part(piece("hi", finished=True))]
    texts = [output.outputs[0].text if output else None for output in told]
    assert texts == ["abc", "de", None, None, "f", "g", "hi"]
    assert third.again().last_part(piece("abcdefghi", finished=True)).outputs[0].finish_reason == "stop"
