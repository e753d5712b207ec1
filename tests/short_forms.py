"""Short and full forms of tests that repeat themselves with other examples, points or seeds. `make
test` tries a quarter of them, different ones in each run, `make test-fast` a few, and
`make test-all` all.
"""

import os

LENGTH = os.environ.get("HEADRACE_TESTS", "short")
SHARE = {"fast": 10, "short": 4, "full": 1}[LENGTH]
MIN_EXAMPLES = {"fast": 3, "short": 5, "full": 1}[LENGTH]


def examples(full: int) -> int:
    """How many examples to try of a property for which the full form tries `full`."""
    return max(min(full, MIN_EXAMPLES), full // SHARE)
