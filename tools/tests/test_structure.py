"""The structure check finds cycles."""

import structure


def test_a_cycle_is_found_with_all_its_members() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert structure.cycles(graph) == [["a", "b", "c"]]


def test_a_graph_without_cycles_passes() -> None:
    assert structure.cycles({"a": {"b", "c"}, "b": {"c"}}) == []


def test_packages_that_import_each_other_are_a_cycle_even_if_their_modules_are_not() -> None:
    graph = {"top.x.one": {"top.y.one"}, "top.y.two": {"top.x.two"}}
    between = structure.package_graph(graph, {"top", "top.x", "top.y"})
    assert structure.cycles(graph) == []
    assert structure.cycles(between) == [["top.x", "top.y"]]


def test_the_workspace_is_read() -> None:
    known = structure.modules()
    assert "bindery_core.errors" in known
    assert "bindery_core.errors" in structure.imports(known["bindery_core.ids"], known)
