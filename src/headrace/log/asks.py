"""What questions and answers are called in the log: the plan makes these topics, the server appends to one and follows the other."""

from __future__ import annotations

ASK_ID, FOUND = "ask_id", "found"
_PREFIX, _ANSWERS = "ask.", ".answers"


def questions_topic(name: str) -> str:
    return f"{_PREFIX}{name}"


def answers_topic(name: str) -> str:
    return f"{_PREFIX}{name}{_ANSWERS}"


def names(topics: list[str]) -> list[str]:
    """The questions that can be asked, among all topics."""
    answers = {topic for topic in topics if topic.startswith(_PREFIX) and topic.endswith(_ANSWERS)}
    return sorted(topic[len(_PREFIX) : -len(_ANSWERS)] for topic in answers if topic[: -len(_ANSWERS)] in topics)
