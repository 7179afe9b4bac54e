# SPDX-License-Identifier: Apache-2.0
"""docs/user_cases.md and the ``user_case`` markers of the tests agree."""

import ast
import collections
import re

import pytest


def _table(root) -> dict[int, dict[str, str]]:
    names = ("row", "symptom", "seen", "does", "test")
    rows = {}
    for line in (root / "docs" / "user_cases.md").read_text().splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split(" | ")]
        if line.startswith("|") and cells[0].isdigit():
            assert len(cells) == len(names), line
            assert int(cells[0]) not in rows, f"row {cells[0]} appears twice"
            rows[int(cells[0])] = dict(zip(names, cells))
    return rows


def _marked(root) -> dict[int, set[str]]:
    """Row -> test files with a test that is marked with it."""
    found = collections.defaultdict(set)
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_marker = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "user_case"
            )
            if is_marker:
                assert node.args, f"{path}: user_case() without a row"
                for argument in node.args:
                    name = path.relative_to(root / "tests").with_suffix("")
                    found[argument.value].add(str(name))
    return found


@pytest.fixture(scope="module")
def table(root):
    return _table(root)


def test_rows_are_in_order_and_complete(table):
    assert list(table) == sorted(table)
    assert len(table) >= 38
    for row, cells in table.items():
        assert all(cells.values()), f"row {row} has an empty cell"
        assert re.search(r"\w+/[\w.-]+#\d+", cells["seen"]), row


def test_files_named_are_those_marked(root, table):
    marked = _marked(root)
    assert set(marked) <= set(table), "a test is marked with a row that the table lacks"
    for row, cells in table.items():
        named = set(re.findall(r"`([\w/]+)`", cells["test"]))
        assert named == marked.get(row, set()), f"row {row}"


def test_every_row_has_a_test_or_the_rig_it_waits_for(table):
    for row, cells in table.items():
        rigs = "one GPU", "ranks on one GPU", "several GPUs"
        has_test = "`" in cells["test"]
        waits = re.search(r"waits for (.*)", cells["test"])
        assert has_test or waits, row
        if waits:
            assert any(rig in waits[1] for rig in rigs), row
