"""The stubs name what the extension has, and nothing else."""

import ast
import pathlib

import crossmesh._native as native

STUBS = pathlib.Path(native.__file__).with_name("_native.pyi")


def names(owner):
    inherited = set(dir(object)) | set(dir(Exception))
    return {name for name in vars(owner) if name not in inherited and not name.startswith("_")}


def test_stubs_are_complete():
    tree = ast.parse(STUBS.read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert names(native) == set(classes) | functions
    for name, node in classes.items():
        methods = {m.name for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")}
        assert methods == names(getattr(native, name)), name
