"""A process that appends to a hot entity and to one of its own, and says on standard output what
was acknowledged. Run by test_processes.
"""

import sys

import headrace as hr
from headrace.errors import VersionConflict
from headrace.events import Change, Event, open_store


def main(directory: str, writer: int, count: int) -> None:
    with hr.open_log(f"file:{directory}") as log, open_store(log, "bank") as store:
        for n in range(count):
            large = (
                "x" * 1_500_000 if (writer, n % 10) == (0, 3) else ""
            )  # appends of very different durations, side by side
            while True:
                version = store.version("hot")
                try:
                    answer = store.commit(
                        [
                            Change(
                                "hot",
                                [Event("Hit", {"writer": writer, "n": n, "large": large})],
                                version,
                            ),
                            Change(f"own-{writer}", [Event("Own", {"n": n})], n),
                        ]
                    )
                except VersionConflict as conflict:
                    if conflict.entity != "hot" or conflict.current <= version:
                        raise
                    continue
                break
            print(n, answer.versions["hot"], answer.offsets.start, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
