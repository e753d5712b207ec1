"""`python -m headrace.cli` is the command `headrace`."""

from headrace.cli import main

main()
