"""A process that excises a subject and is killed at one of the steps, which it says on standard
output. Run by test_excision_of_pipelines.
"""

import os
import signal
import sys

import headrace as hr
from headrace.events import excise, open_store


def main(directory: str, subject: str, value: str, at: int) -> None:
    seen: list[str] = []

    def step(name: str) -> None:
        print(name, flush=True)
        seen.append(name)
        if len(seen) > at:
            os.kill(os.getpid(), signal.SIGKILL)

    with hr.open_log(f"file:{directory}") as log, open_store(log, "bank") as store:
        excise(store, subject, values=[value], step=step)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
