#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints requirements from pyproject.toml, so that no other file repeats them.

Usage: requirements.py [--without NAME]... build|EXTRA [EXTRA ...]

`build` stands for build-system.requires; every other name is an extra. An extra that
names this project (`jax-ulysses[test]`) is expanded.
"""

import argparse
import pathlib
import re
import tomllib

PYPROJECT = pathlib.Path(__file__).resolve().parent.parent / "pyproject.toml"


def distribution(requirement: str) -> str:
    """Returns the normalised distribution name of one requirement."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def expand(groups: list[str], config: dict) -> list[str]:
    """Returns the requirements of all groups, without duplicates, in order."""
    project = config["project"]
    result: list[str] = []
    for group in groups:
        if group == "build":
            requirements = config["build-system"]["requires"]
        elif group in project["optional-dependencies"]:
            requirements = project["optional-dependencies"][group]
        else:
            raise SystemExit(f"{PYPROJECT.name} has no extra named {group!r}")
        for requirement in requirements:
            if distribution(requirement) == project["name"]:
                extras = requirement.partition("[")[2].partition("]")[0]
                result += expand([e.strip() for e in extras.split(",")], config)
            else:
                result.append(requirement)
    return list(dict.fromkeys(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--without", action="append", default=[], metavar="NAME")
    parser.add_argument("groups", nargs="+", metavar="build|EXTRA")
    args = parser.parse_args()
    config = tomllib.loads(PYPROJECT.read_text())
    for requirement in expand(args.groups, config):
        if distribution(requirement) not in args.without:
            print(requirement)


if __name__ == "__main__":
    main()
