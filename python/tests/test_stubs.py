"""The stubs say what the extension has, with its parameters, and nothing else."""

import ast
import inspect
import pathlib

import pytest

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


def written(node):
    """The parameters of a stub: name, kind, and whether it has a default; of a default that is a constant, the default."""
    args, kinds = node.args, inspect.Parameter
    first = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(first) - len(args.defaults)) + args.defaults
    found = [(a.arg, kinds.POSITIONAL_OR_KEYWORD, d) for a, d in zip(first, defaults)]
    found += [(a.arg, kinds.KEYWORD_ONLY, d) for a, d in zip(args.kwonlyargs, args.kw_defaults)]
    if args.kwarg is not None:
        found.append((args.kwarg.arg, kinds.VAR_KEYWORD, None))
    return [(name, kind, None if d is None else ast.literal_eval(d), d is not None) for name, kind, d in found if name not in ("self", "cls")]


def real(function):
    """The same of what the extension has."""
    kinds = inspect.Parameter
    found = []
    for p in inspect.signature(function).parameters.values():
        if p.name not in ("self", "cls", "$self", "$cls"):
            kind = kinds.POSITIONAL_OR_KEYWORD if p.kind is kinds.POSITIONAL_ONLY else p.kind
            has = p.default is not kinds.empty
            found.append((p.name, kind, p.default if has else None, has))
    return found


def stubs():
    """Functions and methods with what they are a stub of; of a class that can be made, the class. What Python itself calls has no signature to compare."""
    for node in ast.parse(STUBS.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield pytest.param(node, getattr(native, node.name), id=node.name)
        for method in node.body if isinstance(node, ast.ClassDef) else []:
            if not isinstance(method, ast.FunctionDef) or (method.name.startswith("_") and method.name not in ("__new__", "__dlpack__")):
                continue
            owner = getattr(native, node.name)
            of = owner if method.name == "__new__" else getattr(owner, method.name)
            yield pytest.param(method, of, id=f"{node.name}.{method.name}")


def is_property(node):
    return any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)


@pytest.mark.parametrize(("node", "of"), list(stubs()))
def test_a_stub_has_the_parameters_that_the_extension_has(node, of):
    """Names, which are keywords only, defaults; and what is a property."""
    assert is_property(node) == inspect.isgetsetdescriptor(of)
    if is_property(node):
        return
    # A default that no text can say is `...` there.
    unsaid = {name for name, _, default, _ in real(of) if default is ...}
    say = lambda found: [(name, kind, None if name in unsaid else default, has) for name, kind, default, has in found]  # noqa: E731
    assert say(written(node)) == say(real(of))
