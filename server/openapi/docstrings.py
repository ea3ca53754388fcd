"""The docstrings below the fields of a struct, which Python does not keep."""

import ast
import inspect
import textwrap


def field_docs(struct: type) -> dict[str, str]:
    """By field; those of base classes count. Empty where there is no source."""
    docs: dict[str, str] = {}
    for one in reversed(struct.__mro__):
        if not one.__module__.startswith(("server.", "configs.")):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        except OSError:
            continue
        docs |= _below_fields(tree.body[0])
    return docs


def _below_fields(definition: ast.stmt) -> dict[str, str]:
    assert isinstance(definition, ast.ClassDef), definition
    found = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            constant = following.value if isinstance(following, ast.Expr) else None
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                found[statement.target.id] = inspect.cleandoc(constant.value)
    return found
