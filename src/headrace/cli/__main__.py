"""`python -m headrace.cli` is the command `headrace`."""

from __future__ import annotations

from headrace.cli import main

main()
