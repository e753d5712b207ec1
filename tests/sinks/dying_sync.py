"""A sync that kills itself, without a word, just before or after a step: what to run and where to
die comes pickled on standard input.
"""

import os
import pickle
import signal
import sys
from typing import Any

import headrace as hr
from headrace.sinks.sync import SinkLoop


def main() -> None:
    sink, address, topic, (owner, name, when, passes) = pickle.load(sys.stdin.buffer)
    real, calls = getattr(owner, name), []

    def dying(*args: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) > passes and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **options)
        if len(calls) > passes:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)
    with hr.open_log(address) as log:
        SinkLoop(sink, log, topic).run(until_caught_up=True)


if __name__ == "__main__":
    main()
