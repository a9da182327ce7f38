"""`python -m hpo`."""

from hpo.cli.commands import main

main()
