"""Seconds until a search has found 99 % of the best score: ours against other samplers and pruners.

    python tests/benchmarks/search_speed.py tabulate     run every configuration
    python tests/benchmarks/search_speed.py replay       search the tables, 20 seeds each

The spaces and their tables are in `tests/benchmarks/spaces/`. To tabulate takes the better part of an hour
and wants a core of its own: `OMP_NUM_THREADS=1 taskset -c 1 python ...`. A replay takes minutes.
"""

from __future__ import annotations

import argparse

import search_replay
import search_table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = search_table.table_names()
    parser.add_argument("command", choices=("tabulate", "replay"))
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--seeds", type=int, default=20, help="replay: how many; default: 20")
    arguments = parser.parse_args()
    names = arguments.tables or known
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"there is no table {', '.join(unknown)}; there are {', '.join(known)}")
    for name in names:
        if arguments.command == "tabulate":
            search_table.tabulate(name)
        else:
            search_replay.print_replays(search_table.load_table(name), range(arguments.seeds))


if __name__ == "__main__":
    main()
