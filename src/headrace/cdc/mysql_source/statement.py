"""What a statement in the binlog does to tables. The row binlog has rows for most changes; some
have a statement alone, such as TRUNCATE, DDL, and what a session writes with `binlog_format =
'STATEMENT'`.

    TRUNCATE `shop`.`orders`                    TRUNCATE, of shop.orders
    ALTER TABLE orders DROP PARTITION p2025     REWRITE, of orders
    ALTER TABLE orders ADD INDEX (state)        NONE
    INSERT INTO orders VALUES (1)               WRITE, of orders
    XA COMMIT X'61',X'',1                       XA_COMMIT, of the transaction 61,,1

Only what is known to leave rows as they are is NONE. A statement that cannot be read is UNKNOWN.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from headrace.cdc.mysql_source.binlog import LoggedQuery


class Effect(Enum):
    """What a statement does."""

    NONE = "none"
    """Nothing to rows, or nothing that the binlog does not have as rows."""
    BEGIN = "begin"
    COMMIT = "commit"
    ROLLBACK = "rollback"
    ROLLBACK_TO_SAVEPOINT = "rollback to savepoint"
    XA_COMMIT = "xa commit"
    XA_ROLLBACK = "xa rollback"
    TRUNCATE = "truncate"
    REWRITE = "rewrite"
    """Rows may have come, gone or changed: DDL."""
    WRITE = "write"
    """Rows may have come, gone or changed: DML as a statement."""
    DROP = "drop"
    DROP_DATABASE = "drop database"
    UNKNOWN = "unknown"
    """It cannot be read, so it may have done anything."""


TableName = tuple[str, str]
"""The schema and the name of a table."""


@dataclass(frozen=True)
class Statement:
    """A statement, as far as capture needs to know it."""

    effect: Effect
    tables: tuple[TableName, ...] = ()
    transaction: str = ""
    """The transaction that XA COMMIT or XA ROLLBACK names."""


# Tokens

_TOKEN = re.compile(
    r"""
      (?P<space>\s+ | \#[^\n]* | --(?=[\s\x00-\x1f]|$)[^\n]* | /\*(?!!|M!).*?\*/ )
    | (?P<open>/\*M?!\d*) | (?P<close>\*/)
    | (?P<name>`(?:[^`]|``)*`)
    | (?P<text>[xXbBnN]?'(?:[^'\\]|''|\\.)*')
    | (?P<quoted>"(?:[^"\\]|""|\\.)*")
    | (?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?(?![\w$]))
    | (?P<word>[\w$\u0080-\U0010ffff@]+)
    | (?P<mark>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_WITHOUT_ESCAPES = re.compile(
    _TOKEN.pattern.replace(r"(?:[^'\\]|''|\\.)*", "(?:[^']|'')*").replace(
        r'(?:[^"\\]|""|\\.)*', '(?:[^"]|"")*'
    ),
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class _Token:
    kind: str
    """`word` or `name` (both can name a table), `text`, `number` or `mark`."""
    text: str

    @property
    def word(self) -> str:
        """The keyword that it may be; empty for anything in quotes."""
        return self.text.upper() if self.kind in {"word", "mark"} else ""


class _Unreadable(Exception):
    """A statement that is not understood."""


def _tokens(query: LoggedQuery) -> list[_Token]:
    """Cut a statement into tokens. What a comment `/*! … */` holds is part of the statement."""
    pattern = _TOKEN if query.has_backslash_escapes else _WITHOUT_ESCAPES
    tokens = []
    for match in pattern.finditer(query.text):
        kind, text = str(match.lastgroup), match[0]
        if kind in {"space", "open", "close"}:
            continue
        if kind == "name" or (kind == "quoted" and query.has_ansi_quotes):
            quote = text[0]
            tokens.append(_Token("name", text[1:-1].replace(quote * 2, quote)))
        elif kind in {"text", "quoted"}:
            tokens.append(_Token("text", text[text.index(text[-1]) + 1 : -1]))
        elif kind == "mark" and text in "'\"`":
            raise _Unreadable("a quote is not closed")
        else:
            tokens.append(_Token(kind, text))
    while tokens and tokens[-1].text == ";":
        tokens.pop()
    return tokens


# Statements

_HARMLESS = frozenset({
    "ANALYZE", "BINLOG", "CACHE", "CHANGE", "CHECK", "CHECKSUM", "CLONE", "DEALLOCATE", "EXECUTE",
    "FLUSH", "GRANT", "HELP", "INSTALL", "KILL", "LOCK", "OPTIMIZE", "PREPARE", "PURGE", "RELEASE",
    "REPAIR", "RESET", "RESTART", "REVOKE", "SAVEPOINT", "SET", "SHOW", "SHUTDOWN", "SIGNAL",
    "STOP", "UNINSTALL", "UNLOCK", "USE",
})  # fmt: skip
_WRITES = frozenset({
    "CALL", "DELETE", "DO", "HANDLER", "IMPORT", "INSERT", "LOAD", "REPLACE", "SELECT", "UPDATE",
    "WITH", "(",
})  # fmt: skip
_OTHER_OBJECTS = frozenset({
    "AGGREGATE", "ALGORITHM", "CATALOG", "DEFINER", "EVENT", "FULLTEXT", "FUNCTION", "INDEX",
    "INSTANCE", "LIBRARY", "LOGFILE", "MASKING", "PACKAGE", "PREPARE", "PROCEDURE", "RESOURCE",
    "ROLE", "SEQUENCE", "SERVER", "SPATIAL", "SQL", "TABLESPACE", "TRIGGER", "UNDO", "UNIQUE",
    "USER", "VECTOR", "VIEW",
})  # fmt: skip
_KEEPS_ROWS = frozenset({
    # options of tables
    "ALGORITHM", "AUTOEXTEND_SIZE", "AUTO_INCREMENT", "AVG_ROW_LENGTH", "CHARACTER", "CHARSET",
    "CHECKSUM", "COLLATE", "COMMENT", "COMPRESSION", "CONNECTION", "DATA", "DEFAULT",
    "DELAY_KEY_WRITE", "ENCRYPTED", "ENCRYPTION", "ENCRYPTION_KEY_ID", "ENGINE", "ENGINE_ATTRIBUTE",
    "FORCE", "INDEX", "KEY_BLOCK_SIZE", "LOCK", "MAX_ROWS", "MIN_ROWS", "NOWAIT", "ORDER",
    "PACK_KEYS", "PAGE_CHECKSUM", "PAGE_COMPRESSED", "PAGE_COMPRESSION_LEVEL", "ROW_FORMAT",
    "SECONDARY_ENGINE", "SECONDARY_ENGINE_ATTRIBUTE", "SEQUENCE", "STATS_AUTO_RECALC",
    "STATS_PERSISTENT", "STATS_SAMPLE_PAGES", "TRANSACTIONAL", "WAIT", "WITHOUT",
    # partitions, whose rows stay or are moved
    "ANALYZE", "CHECK", "COALESCE", "OPTIMIZE", "PARTITION", "REBUILD", "REMOVE", "REORGANIZE",
    "REPAIR",
    # columns and indexes
    "ALTER", "DISABLE", "ENABLE",
})  # fmt: skip
"""The first words of actions of ALTER TABLE that leave all rows as they are."""
_ADDED = frozenset({
    "CHECK", "CONSTRAINT", "FOREIGN", "FULLTEXT", "INDEX", "KEY", "PARTITION", "SPATIAL", "UNIQUE",
    "VECTOR",
})  # fmt: skip
_DROPPED_WITH_ROWS = frozenset({"PARTITION", "CONSTRAINT", "FOREIGN"})
"""What takes rows with it when it is dropped; or foreign keys, whose cascades cannot be foreseen
any more.
"""


@lru_cache(maxsize=256)
def parse(query: LoggedQuery) -> Statement:
    """Return what a statement does.

    Args:
        query: The statement, as the binlog has it.

    Returns:
        Its effect, and the tables that it has it on.

    Example:
        >>> parse(LoggedQuery("TRUNCATE a", "shop", False, True)).tables
        (('shop', 'a'),)
    """
    try:
        return _Parser(_tokens(query), query.schema).statement()
    except (_Unreadable, IndexError):
        return Statement(Effect.UNKNOWN)


class _Parser:
    def __init__(self, tokens: Sequence[_Token], schema: str) -> None:
        self.tokens = tokens
        self.schema = schema
        self.at = 0

    # Reading

    def peek(self) -> str:
        return self.tokens[self.at].word if self.at < len(self.tokens) else ""

    def peek_or_fail(self) -> None:
        if self.at >= len(self.tokens):
            raise _Unreadable("it ends too early")

    def words(self, count: int) -> list[str]:
        return [token.word for token in self.tokens[self.at : self.at + count]]

    def skip(self, *words: str) -> bool:
        """Skip one of some words, if it is the next one."""
        if self.peek() in words:
            self.at += 1
            return True
        return False

    def skip_if_exists(self) -> None:
        if self.skip("IF"):
            self.skip("NOT")
            if not self.skip("EXISTS"):
                raise _Unreadable("IF without EXISTS")

    def identifier(self) -> str:
        token = self.tokens[self.at]
        if token.kind not in {"word", "name"}:
            raise _Unreadable(f"{token.text} is no name")
        self.at += 1
        return token.text

    def table(self) -> TableName:
        name = self.identifier()
        return (name, self.identifier()) if self.skip(".") else (self.schema, name)

    def named(self, start: int = 0) -> tuple[TableName, ...]:
        """Return all names that follow, qualified or not: the tables are among them."""
        self.at, names = start, []
        while self.at < len(self.tokens):
            if self.tokens[self.at].kind in {"word", "name"}:
                names.append(self.table())
                if self.skip("."):  # a column, after schema and table
                    self.at += 1
            else:
                self.at += 1
        return tuple(dict.fromkeys(names))

    # Statements

    def statement(self) -> Statement:
        if not self.tokens:
            return Statement(Effect.NONE)
        first = self.peek()
        self.at = 1
        if first == "SET" and self.skip("STATEMENT"):  # … FOR another statement
            while not self.skip("FOR"):
                self.at += 1
                self.peek_or_fail()
            return _Parser(self.tokens[self.at :], self.schema).statement()
        if first == "ANALYZE" and not {"TABLE", "TABLES"} & set(self.words(2)):
            return Statement(Effect.WRITE, self.named(1))  # it runs the statement that follows
        if first in _HARMLESS:
            return Statement(Effect.NONE)
        if first in _WRITES:
            return Statement(Effect.WRITE, self.named())
        handlers = {
            "BEGIN": lambda: Statement(Effect.BEGIN),
            "START": self._start,
            "COMMIT": lambda: Statement(Effect.COMMIT),
            "ROLLBACK": self._rollback,
            "XA": self._xa,
            "TRUNCATE": self._truncate,
            "RENAME": self._rename,
            "DROP": self._drop,
            "CREATE": self._create,
            "ALTER": self._alter,
        }
        if first not in handlers:
            raise _Unreadable(f"unknown statement {first}")
        return handlers[first]()

    def _start(self) -> Statement:
        return Statement(Effect.BEGIN if self.peek() == "TRANSACTION" else Effect.NONE)

    def _rollback(self) -> Statement:
        self.skip("WORK")
        return Statement(Effect.ROLLBACK_TO_SAVEPOINT if self.skip("TO") else Effect.ROLLBACK)

    def _xa(self) -> Statement:
        effects = {"COMMIT": Effect.XA_COMMIT, "ROLLBACK": Effect.XA_ROLLBACK}
        effect = effects.get(self.peek())
        if effect is None:
            return Statement(Effect.BEGIN if self.peek() in {"START", "BEGIN"} else Effect.NONE)
        parts = [token.text for token in self.tokens[2:] if token.kind in {"text", "number"}]
        if len(parts) != 3:
            raise _Unreadable("a transaction's name has three parts in the binlog")
        return Statement(effect, transaction=",".join(parts).lower())

    def _truncate(self) -> Statement:
        self.skip("TABLE")
        return Statement(Effect.TRUNCATE, (self.table(),))

    def _rename(self) -> Statement:
        if not self.skip("TABLE", "TABLES"):
            return Statement(Effect.NONE)  # a user
        self.skip_if_exists()
        return Statement(Effect.REWRITE, self.named(self.at))

    def _drop(self) -> Statement:
        if self.skip("DATABASE", "SCHEMA"):
            self.skip_if_exists()
            return Statement(Effect.DROP_DATABASE, ((self.identifier(), ""),))
        is_temporary = self.skip("TEMPORARY")
        if not self.skip("TABLE", "TABLES"):
            return self._other_object()
        self.skip_if_exists()
        tables = [self.table()]
        while self.skip(","):
            tables.append(self.table())
        return Statement(Effect.NONE) if is_temporary else Statement(Effect.DROP, tuple(tables))

    def _create(self) -> Statement:
        is_replaced = self.skip("OR") and self.skip("REPLACE")
        is_temporary = self.skip("TEMPORARY")
        if self.skip("DATABASE", "SCHEMA"):
            self.skip_if_exists()
            effect = Effect.DROP_DATABASE if is_replaced else Effect.NONE
            return Statement(effect, ((self.identifier(), ""),))
        if not self.skip("TABLE"):
            return self._other_object()
        self.skip_if_exists()
        table = self.table()
        return Statement(Effect.NONE) if is_temporary else Statement(Effect.REWRITE, (table,))

    def _other_object(self) -> Statement:
        if self.peek() not in _OTHER_OBJECTS:
            raise _Unreadable(f"unknown object {self.peek()}")
        return Statement(Effect.NONE)

    # ALTER TABLE

    def _alter(self) -> Statement:
        self.skip("ONLINE")
        is_ignore = self.skip("IGNORE")
        if self.peek() in {"DATABASE", "SCHEMA", "PERSISTENT"}:
            return Statement(Effect.NONE)
        if not self.skip("TABLE"):
            return self._other_object()
        self.skip_if_exists()
        table = self.table()
        if self.skip("WAIT"):
            self.at += 1
        self.skip("NOWAIT")
        start = self.at
        actions = self._actions()
        if not is_ignore and all(_keeps_rows(action) for action in actions):
            return Statement(Effect.NONE)
        moves = {"EXCHANGE", "CONVERT", "RENAME"}
        others = self.named(start) if any(_words(action)[0] in moves for action in actions) else ()
        return Statement(Effect.REWRITE, (table, *others))

    def _actions(self) -> list[list[_Token]]:
        """Return the actions, which are separated by commas outside of parentheses."""
        actions: list[list[_Token]] = [[]]
        depth = 0
        for token in self.tokens[self.at :]:
            depth += {"(": 1, ")": -1}.get(token.word, 0)
            if token.word == "," and not depth:
                actions.append([])
            else:
                actions[-1].append(token)
        return [action for action in actions if action]


def _words(action: Sequence[_Token]) -> list[str]:
    return [token.word for token in action[:3]] + [""] * max(3 - len(action), 0)


def _keeps_rows(action: Sequence[_Token]) -> bool:
    """Return whether an action of ALTER TABLE leaves all rows as they are. ADD COLUMN does not: it
    may follow a DROP of a column of that name, and gives every row a value.
    """
    first, second, _ = _words(action)
    if first == "ADD":
        return second in _ADDED
    if first == "DROP":
        return second not in _DROPPED_WITH_ROWS
    if first == "RENAME":
        return second in {"INDEX", "KEY"}
    if first == "WITH":
        return second in {"VALIDATION", "SYSTEM"}
    return first in _KEEPS_ROWS
