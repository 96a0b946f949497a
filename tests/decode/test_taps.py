from __future__ import annotations

from rayspec.decode.round_planner import TapLog
from rayspec.decode.work import TappedToken


def _tokens(*names: str) -> list[TappedToken]:
    return [TappedToken(name, position) for position, name in enumerate(names)]


def test_the_last_tokens_stay() -> None:
    log = TapLog(3)
    tokens = _tokens("a", "b", "c", "d")
    log.add(tokens[:2])
    assert log.tokens == tokens[:2]
    log.add(tokens[2:])
    assert log.tokens == tokens[1:]
    log.clear()
    assert log.tokens == []


def test_a_dropped_token_keeps_its_place_as_its_states_do() -> None:
    """The stages keep the states of the last three tokens, whoever they were of."""
    log = TapLog(3)
    first, *later = _tokens("a", "b", "b", "c")
    log.add([first])
    log.add(later[:2])
    log.drop("b")
    assert log.tokens == [first]
    log.add(later[2:])
    assert log.tokens == later[2:], "the states of the first have been pushed out"
