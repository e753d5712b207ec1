"""FINAL and RUNNING, which SQL writes before a call in a measure, as calls around it: `final sum(a) - sum(a)` is `final(sum(a)) - sum(a)`."""

from __future__ import annotations

from sqlglot.dialects.spark import Spark
from sqlglot.errors import TokenError
from sqlglot.tokenizer_core import Token, TokenType

FINAL, RUNNING = "final", "running"


def with_calls(text: str) -> str:
    """The text, with parentheses. What cannot be cut into tokens stays as it is: who reads it says so."""
    try:
        tokens = list(Spark().tokenize(text))
    except TokenError:
        return text
    opened, closed = _marks(tokens)
    parts, at = [], 0
    for number, token in enumerate(tokens):
        parts += [text[at : token.end + 1], "(" if number in opened else "", ")" * closed.get(number, 0)]
        at = token.end + 1
    return "".join([*parts, text[at:]])


def _marks(tokens: list[Token]) -> tuple[set[int], dict[int, int]]:
    """The words that get a parenthesis behind them, and the tokens behind which it is closed."""
    opened, closed = set(), dict[int, int]()
    for at in range(len(tokens) - 1):
        if tokens[at].text.lower() in (FINAL, RUNNING) and tokens[at + 1].token_type not in (TokenType.L_PAREN, TokenType.DOT) and _is_name(tokens[at + 1]):
            opened.add(at)
            end = _end(tokens, at + 1)
            closed[end] = closed.get(end, 0) + 1
    return opened, closed


def _is_name(token: Token) -> bool:
    return token.text[:1].isalpha() or token.text[:1] == "_"


def _end(tokens: list[Token], at: int) -> int:
    """The last token of a call, or of a column."""
    while at + 2 < len(tokens) and tokens[at + 1].token_type == TokenType.DOT:
        at += 2
    if at + 1 >= len(tokens) or tokens[at + 1].token_type != TokenType.L_PAREN:
        return at
    depth = 0
    for number in range(at + 1, len(tokens)):
        depth += (tokens[number].token_type == TokenType.L_PAREN) - (tokens[number].token_type == TokenType.R_PAREN)
        if depth == 0:
            return number
    return len(tokens) - 1
