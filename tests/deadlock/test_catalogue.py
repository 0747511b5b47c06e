"""The catalogue of hazards is complete, and its tests exist."""

from __future__ import annotations

import ast

from tests.deadlock.catalogue import (
    ABSENT,
    ELSEWHERE,
    HAZARDS,
    IN_PART,
    ROOT,
    found_here,
    table,
)


def test_every_hazard_has_a_test_or_a_reason():
    tested = {*found_here(), *ELSEWHERE}
    for hazard, lines in table().items():
        assert lines, hazard
        assert (hazard in tested) != (hazard in ABSENT), hazard
        assert (hazard in tested) >= (hazard in IN_PART), hazard


def test_no_test_names_a_hazard_that_is_not_in_the_catalogue():
    assert set(found_here()) | set(ELSEWHERE) | set(ABSENT) | set(IN_PART) == set(HAZARDS)


def test_tests_of_other_folders_exist():
    for node_id in (node for nodes in ELSEWHERE.values() for node in nodes):
        path, name = node_id.split("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in names, node_id


def test_every_test_of_the_folder_names_its_hazards():
    named = {node for nodes in found_here().values() for node in nodes}
    tools = ("test_faults.py", "test_catalogue.py")
    for path in sorted((ROOT / "tests/deadlock").glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                node_id = f"tests/deadlock/{path.name}::{node.name}"
                assert node_id in named or path.name in tools, node_id
