from __future__ import annotations

from benchmarks.papers.choices import ACCEPTANCE, choices_markdown, predict_choices


def test_long_contexts_take_few_keys_and_short_ones_quantised_weights() -> None:
    found = {(one.model, one.context, one.batch): one for one in predict_choices()}
    assert found["Llama-3.1-70B", 1024, 1].best == "int4"
    assert found["Llama-3.1-70B", 131072, 8].best == "int4+pages"
    for one in found.values():
        assert set(one.gains) == set(ACCEPTANCE)
        assert min(one.gains.values()) >= 1, "no draft is a candidate"
        assert one.gains[one.best] == max(one.gains.values())


def test_what_does_not_fit_the_gpus_is_left_out() -> None:
    assert not any(one.context * one.batch > 2_000_000 for one in predict_choices())


def test_every_prediction_has_a_line() -> None:
    found = predict_choices()
    assert choices_markdown(found).count("\n| Llama") == len(found)
