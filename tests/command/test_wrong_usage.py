"""What a command line cannot ask for is a line with the remedy and code 2, before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import benchmarks.__main__
from rayspec.cli import app

BENCH = "bench --model absent"
TUNE = "tune --model demo --input demo:summary -o plans.json"
FIGURES = "figures --model demo --output out"
WRONG = [
    (f"{BENCH} --strategies ar,knapspac", "did you mean 'knapspec'?"),
    (f"{BENCH} --context 100,1k", "option 'context.1' is '1k'"),
    (f"{BENCH} --strategies ,", "option 'strategies.0' is ''"),
    (f"{BENCH} --plans a.json", "option 'plans' is ['a.json']: write it as NAME=VALUE"),
    (f"{BENCH} --plans a=b.json --plans a=c.json", "a name stands twice"),
    ("summarize --model absent --drain-s 1e20", "option 'drain_s' is 1e+20: it must be at most 9.22337e+09 seconds"),
    (f"{BENCH} --json a-file/new.json", "option 'json' is 'a-file/new.json': "),
    (f"{BENCH} --json .", "option 'json' is '.': it is a folder; choose another place"),
    (f"{BENCH} -o a-file", "option 'output' is 'a-file/results.json': "),
    (f"{BENCH} -o new --plans clasp=c.json", "'clasp', which does not run"),
    (f"{BENCH} --widen 0", "option 'widen' is 0"),
    (f"{BENCH} --widen {2**63 - 1}", "it must be less than or equal to 64"),
    (f"{BENCH} --num-prompts {2**63 - 1}", "it must be less than or equal to 100000"),
    (f"{BENCH} --context {2**63 - 1}", "option 'context.0' is '9223372036854775807': it must be less than"),
    (f"{BENCH} --strategy lookup", "option 'strategy' is 'lookup': name it in 'strategies'"),
    (f"{BENCH} --max-num-seqs 4", "option 'max_num_seqs' is 4: name the sequences decoded at once in 'batch'"),
    (f"{BENCH} --stream 0,1", "python -m benchmarks streams"),
    (f"{BENCH} --threads 2", "is now '--num-threads'"),
    ("tune --model demo -o plans.json", "option 'input' is missing"),
    ("tune --model demo --input demo:summary -o plans.txt", "must end in .json"),
    ("tune --model demo --input demo:summary -o a-file/plans.json", "choose another place"),
    (f"{TUNE} --strategy ar", "option 'strategy' is 'ar': plans are tuned without a strategy, leave it out"),
    (f"{TUNE} --num-tries 0", "option 'num_tries' is 0"),
    (f"{TUNE} --batch 2 --max-num-seqs 4", "option 'max_num_seqs' is 4"),
    (f"{TUNE} --plans-by knapspec", "is gone: plans are tuned by trials"),
    ("tune --threshold=0.5", "'--threshold' is now 'speculation.draft_threshold'"),
    ("generate in.txt --lookup-tokens 4", "'--lookup-tokens' is gone: drafts have 10 tokens"),
    ("generate a-file --model demo --system absent.md", "option 'system' is 'absent.md', and there is no such file"),
    ("serve --port 0 --model demo --dtype float31", "'dtype'"),
    ("serve --port 0 demo --quantization awq", "option 'quantization' is 'awq': the quantisation of a checkpoint"),
    ("serve --port 0 demo --seed 5", "option 'seed' is 5: only `LLM(seed=...)` takes it"),
    ("serve --port 0 demo -tp 0", "in 'parallel': option 'tensor' is 0"),
    ("serve --port 0 demo --hf-overrides {'a':1}", "option 'hf_overrides' is {'a': 1}: edit config.json"),
    ("serve --port 0 demo --model demo", "option 'model' is given twice, as 'demo' and by --model"),
    ("serve --port 0 demo --no-enable-chunked-prefill", "option 'enable_chunked_prefill' is False: prompts always run"),
    ("serve --port 0 demo --batches=", "option 'batches' is ''"),
    ("bench-serve --model demo", "python -m benchmarks serve"),
    ("figures --model demo", "python -m benchmarks figures"),
    ("demo --price -1", "option 'price' is -1.0: it must be greater than or equal to 0"),
    ("demo --price nan", "option 'price' is nan: it must be a finite number"),
    ("generate in.txt --model demo --sample 0", "option 'sample' is 0.0: it must be greater than 0"),
    ("selfcheck --json a-file/new.json", "option 'json' is 'a-file/new.json': "),
    ("models --json a-file/new.json", "option 'json' is 'a-file/new.json': "),
    ("doctor --json .", "option 'json' is '.': it is a folder; choose another place"),
    ("placement --model demo --json .", "option 'json' is '.': it is a folder; choose another place"),
    ("plan --model demo --json .", "option 'json' is '.': it is a folder; choose another place"),
    ("k8s render --config absent.yaml", "option 'config': the file 'absent.yaml' cannot be read"),
    ("selfcheck --num-threads 4097", "'--num-threads': it must be less than or equal to 4096"),
    ("selfcheck --device cuda:99", "option 'device' is 'cuda:99'"),
]
WRONG_BENCHMARKS = [
    (f"{FIGURES} --only tpt,tps", "'only' is tpt, tps: choose of speedup, tpt"),
    (f"{FIGURES} --domains summary,poems", "'domains' is 'summary, poems': choose of summary"),
    (f"{FIGURES} --stages 2", "'parallel' is set"),
    (f"{FIGURES} --draft-lengths 3,17", "'draft_lengths' is '3, 17': give numbers from 1 to 16"),
    (f"{FIGURES} --thresholds 0.5,1.5", "'thresholds' is '0.5, 1.5': give numbers from 0 to 1"),
    ("pipeline --model demo --cases two", "1x1,2x1,2x4"),
    ("pipeline --model demo --strategies knapspac", "'knapspec'"),
]


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [*((app, *one) for one in WRONG), *((benchmarks.__main__.app, *one) for one in WRONG_BENCHMARKS)],
)
def test_wrong_usage_is_told_with_code_2(
    program: Any, words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    monkeypatch.setattr("rayspec.bench.tune.load_llm", None)
    result = CliRunner().invoke(program, words.split())
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert list(Path().iterdir()) == [Path("a-file")]
