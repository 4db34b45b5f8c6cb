"""Turns the signals that ask a process to end into exceptions, so that the code after ``finally`` still cleans up."""

import contextlib
import signal
import threading
from collections.abc import Iterator

_SIGNALS = ("SIGTERM", "SIGHUP")
"""Signals that end a Python process at once by default. For SIGINT (Ctrl-C), Python raises KeyboardInterrupt itself."""


class Ended(KeyboardInterrupt):
    """A signal asked this process to end. ``number`` is the number of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise :class:`Ended` in a ``with`` statement when SIGTERM or SIGHUP arrives. A second signal ends the process.

    Only the main thread can set signal handlers. In any other thread, this function changes nothing. If the process
    ignores a signal (after ``nohup`` it ignores SIGHUP), it still ignores this signal.
    """
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number, handler in before.items() if handler is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        handled = []

    def end(number: int, frame: object) -> None:
        for one in handled:
            signal.signal(one, signal.SIG_DFL)
        raise Ended(number)

    try:
        for number in handled:
            signal.signal(number, end)
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
