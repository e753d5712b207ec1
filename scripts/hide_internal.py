"""A griffe extension: the reference does not show members whose docstring begins with "Internal:".

`mkdocs.yml` names it. Such members are public for other packages of Headrace, not for users.
"""

from __future__ import annotations

from typing import Any

import griffe

MARK = "Internal:"


class HideInternal(griffe.Extension):
    """Removes internal members from a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        hide(pkg)


def hide(scope: griffe.Object) -> None:
    """Remove the internal members of a module or class, and of everything in it."""
    for name, member in list(scope.members.items()):
        if member.is_alias:
            continue
        if member.docstring is not None and member.docstring.value.lstrip().startswith(MARK):
            scope.del_member(name)
        elif member.is_module or member.is_class:
            hide(member)
