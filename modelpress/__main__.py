"""`python -m modelpress`: the same as the `modelpress` command."""

from modelpress.cli import main

main()
