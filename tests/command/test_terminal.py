import os
import signal

import pytest

from rayspec.command.terminal import clean_exit


def test_a_sigterm_ends_with_its_code_and_the_handler_is_that_of_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, clean_exit():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
