"""What all benches share: their arguments and how they end."""

import argparse
import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any


def arguments(description: str, out: str = "JSON file to write") -> argparse.ArgumentParser:
    """A parser with the arguments of every bench; `out` says what --out is."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--out", type=Path, help=out)
    return parser


def finish(result: dict[str, Any], headline: str, out: Path | None) -> None:
    """Write the result where asked for, and end with the headline figure, named by its path."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1))
    figure = reduce(getitem, headline.split("."), result)
    print(f"{headline}: {'none' if figure is None else format(figure, '.3f')}")
