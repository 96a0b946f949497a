from __future__ import annotations

import os
import signal
import threading

import pytest

from rayspec.command.terminal import clean_exit, exit_on_sigterm


def test_a_sigterm_ends_with_its_code_and_the_handler_is_that_of_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, clean_exit():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_have_no_signals_to_handle() -> None:
    done = []

    def work() -> None:
        with clean_exit():
            exit_on_sigterm()
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
