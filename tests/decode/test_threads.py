"""Work in a thread that ends with it."""

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rayspec import local_engine
from rayspec.config import EngineConfig
from rayspec.decode.runner import in_thread_of_its_own
from tests.families import checkpoint


def test_an_error_is_raised_here() -> None:
    with pytest.raises(KeyError, match="what"):
        in_thread_of_its_own(lambda: {}["what"])


def test_engines_are_loaded_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads keeps no helpers of OpenMP beside those of whoever decodes."""
    seen: list[threading.Thread] = []
    load = local_engine.load_weights
    monkeypatch.setattr(
        local_engine, "load_weights", lambda config: seen.append(threading.current_thread()) or load(config)
    )
    config = EngineConfig(model=checkpoint("llama"), device="cpu", num_threads=1, max_model_len=64)
    local_engine.load_engine(config, with_tokenizer=False).shutdown()
    assert not seen[0].is_alive()


@pytest.mark.parametrize(
    ("asked", "expected"), [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")]
)
def test_idle_threads_spin_for_a_short_time(asked: dict[str, str], expected: str) -> None:
    """By what torch's own OpenMP prints when it is loaded after rayspec. What the user has set stays."""
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent  # type: ignore[union-attr,arg-type]
    (library,) = [*torch_folder.glob("lib/libgomp*"), *torch_folder.parent.glob("torch.libs/libgomp*")]
    script = f"import rayspec, sys, ctypes; assert 'torch' not in sys.modules; ctypes.CDLL({str(library)!r})"
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, **asked, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr
