"""Metrics as Prometheus reads them: one family of samples after the other, as text."""

from __future__ import annotations

MEDIA_TYPE = "text/plain; version=0.0.4"


def family(name: str, kind: str, what: str, samples: list[tuple[dict[str, str], float]]) -> list[str]:
    if not samples:
        return []
    return [f"# HELP {name} {what}", f"# TYPE {name} {kind}", *(f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples)]


def _labels(labels: dict[str, str]) -> str:
    written = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{written}}}" if written else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
