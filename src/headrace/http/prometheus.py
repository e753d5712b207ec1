"""Metrics in Prometheus' text format, for the server of views and for gateways."""

from __future__ import annotations

MEDIA_TYPE = "text/plain; version=0.0.4"


def family(
    name: str, kind: str, what: str, samples: list[tuple[dict[str, str], float]]
) -> list[str]:
    """Return the lines of one family of metrics, none if it has no samples.

    Args:
        name: The metric's name.
        kind: "counter" or "gauge".
        what: What it measures.
        samples: Labels and values.
    """
    if not samples:
        return []
    return [
        f"# HELP {name} {what}",
        f"# TYPE {name} {kind}",
        *(f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples),
    ]


def _labels(labels: dict[str, str]) -> str:
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
