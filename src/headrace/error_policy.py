"""The `errors=` parameter: what becomes of a row that cannot be computed or decoded.

The parameter means the same wherever it occurs (`select`, `where`, `with_columns`, `aggregate`,
`hr.cdc.debezium`), and takes one of three values:

    "null"      the failed value is null, the row goes on, and the failure is counted
    "divert"    the row goes to dead letters, with the reason
    "stop"      the run ends with an error that names the row's step

A custom aggregate that raises on a row has no value that could be null: "null" too ends the run
then. A call that cannot follow one of them refuses it when it is declared, and says which it
supports.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import PlanError, nearest

NULL = "null"
DIVERT = "divert"
STOP = "stop"
ERROR_POLICIES = (NULL, DIVERT, STOP)

_EFFECTS = {
    NULL: "makes the result null",
    DIVERT: "sends the row to dead letters",
    STOP: "ends the run with an error",
}


def check_error_policy(
    errors: str, *, where: str, supported: Sequence[str] = ERROR_POLICIES
) -> str:
    """Return the policy if `where` supports it.

    Raises:
        PlanError: It is no policy, or one that is not supported there.
    """
    if errors in supported:
        return errors
    reason = (
        ", which is not supported here."
        if errors in ERROR_POLICIES
        else f": {nearest(str(errors), supported)}"
    )
    raise PlanError(
        f"{where} has errors={errors!r}{reason}",
        fix="; ".join(f"{policy!r} {_EFFECTS[policy]}" for policy in supported) + ".",
    )
