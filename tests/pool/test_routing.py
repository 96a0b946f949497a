from __future__ import annotations

from rayspec.pool.routing import Router, part_hashes

PROMPT = part_hashes("The annual review. " * 60)
OTHER = part_hashes("Another review. " * 60)


def test_prompts_that_begin_alike_share_the_hashes_of_their_first_parts() -> None:
    text = "".join(chr(ord("a") + number % 26) * 7 for number in range(400))
    one, two = part_hashes(text), part_hashes(text[:1000] + "!" + text[1001:])
    assert len(one) == len(two) == 2800 // 256
    assert one[:3] == two[:3]
    assert not set(one[3:]) & set(two[3:])
    tokens = list(range(300))
    assert part_hashes(tokens) == part_hashes(tuple(tokens))
    assert part_hashes(tokens)[:2] == part_hashes([*tokens[:128], 9, *tokens[129:]])[:2]
    assert part_hashes(None) == part_hashes("short") == part_hashes([1, 2]) == ()
    assert len(part_hashes("a" * 10**6)) == len(part_hashes([7] * 10**5)) == 32
    assert part_hashes("\ud800" * 256), "what is no text is the engine's to refuse"


def test_the_engine_that_was_given_the_beginning_gets_the_prompt() -> None:
    router = Router()
    assert router.choose(PROMPT, {0: 1, 1: 0}) == 1
    assert router.choose(PROMPT, {0: 1, 1: 3}) == 1
    assert router.choose(OTHER, {0: 1, 1: 3}) == 0


def test_a_busy_engine_does_not() -> None:
    router = Router()
    router.choose(PROMPT, {1: 0})
    assert router.choose(PROMPT, {0: 0, 1: 4}) == 1
    assert router.choose(PROMPT, {0: 10, 1: 24}) == 1
    assert router.choose(PROMPT, {0: 0, 1: 5}) == 0
    assert router.choose(PROMPT, {0: 3, 1: 0}) == 0, "it has the beginning now"


def test_without_a_beginning_the_least_busy_gets_it() -> None:
    router = Router()
    assert router.choose(PROMPT, {0: 3, 1: 2, 2: 9}) == 1
    assert router.choose((), {0: 3, 2: 1}) == 2


def test_an_engine_that_was_replaced_has_nothing() -> None:
    router = Router()
    router.choose(PROMPT, {1: 0})
    router.forget(1)
    assert router.choose(PROMPT, {0: 0, 1: 1}) == 0


def test_an_engine_that_is_lost_is_not_chosen() -> None:
    router = Router()
    router.choose(PROMPT, {1: 0})
    assert router.choose(PROMPT, {0: 7}) == 0
