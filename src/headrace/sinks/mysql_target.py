"""The target `mysql`: a table of a MariaDB or MySQL database.

One SQL transaction contains the rows of a batch and the checkpoint, which is a row of the table
`_headrace_sinks`. A commit locks that row first, so that two processes take turns, and the older
one then finds that it is not the owner any more.

Rows are written by statements with many rows, which Arrow builds column by column, each as long as
`max_allowed_packet` allows and at most `MAX_STATEMENT_BYTES`:

    INSERT INTO `orders` (`id`, `name`) VALUES (7, 'ada'), (8, NULL)
    ON DUPLICATE KEY UPDATE `name` = VALUES(`name`)

If the table has another unique index, `ON DUPLICATE KEY UPDATE` would change a row of another key.
Then rows go to a temporary table, from which existing keys are updated and others inserted.

Types of columns:

    Spark                            MariaDB and MySQL
    BOOLEAN                          boolean
    TINYINT, SMALLINT, INT, BIGINT   tinyint, smallint, int, bigint
    FLOAT, DOUBLE                    float, double; NaN and infinities are refused, -0.0 is 0.0
    DECIMAL(p, s)                    decimal(p, s)
    STRING, BINARY                   longtext, longblob; in a key varchar and varbinary
    DATE                             date; years 1 to 9999
    TIMESTAMP, TIMESTAMP_NTZ         datetime(6), in UTC; years 1 to 9999
    TIME                             time(6)
    INTERVAL                         bigint, microseconds
    ARRAY, MAP, STRUCT, VARIANT      longtext, JSON as the log writes it

Text is compared by its bytes: 'a', 'A' and 'a ' are three keys, which most collations take for one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import (
    ConfigurationError,
    MissingExtra,
    TargetMismatch,
    TargetUnavailable,
    nearest,
)
from headrace.mysql import connection_settings
from headrace.sinks.base import (
    READ_ROWS,
    Refusal,
    RowsRefused,
    SinkSpec,
    Target,
    bisect_refused,
    convert_readable,
    refusals,
    refuse_unreadable,
)
from headrace.sinks.batch import SinkBatch, TargetShape
from headrace.sinks.checkpoint import SinkCheckpoint
from headrace.types.json_codec import json_text
from headrace.types.schema import type_name
from headrace.types.sqlite_codec import nested_array, nested_text, time_array, time_text

try:
    import pymysql
    import pymysql.converters
    import pymysql.cursors
except ImportError as error:
    raise MissingExtra("pymysql", "mysql") from error

CHECKPOINT_TABLE = "_headrace_sinks"
CONNECT_S = 10
STATEMENT_S = 600
"""How long a statement may take before the connection counts as lost."""
LOCK_WAIT_S = 10
IDLE_TRANSACTION_S = 60
"""After this time without a statement MariaDB ends a transaction, whose process may be halted."""
MAX_STATEMENT_BYTES = 4 << 20
_STATEMENT_BYTES = 1024
"""Reserved in a packet for a column's name and its part of a statement."""
_KEYS_PER_STATEMENT = 500
MAX_KEY_BYTES = 3072
_FIXED_KEY_BYTES = 24
"""The most bytes of one column of a fixed width in an index."""
_STAGING = "headrace_rows"
_SESSION = (
    "SET time_zone = '+00:00', sql_mode ="
    " 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,NO_AUTO_VALUE_ON_ZERO', innodb_lock_wait_timeout ="
    f" {LOCK_WAIT_S}"
)
_BINARY_COLLATIONS = ("utf8mb4_nopad_bin", "utf8mb4_0900_bin")
"""Collations that compare all bytes, trailing spaces too: MariaDB's and MySQL's."""

_REFUSAL_CODES = {
    *(1048, 1062, 1364, 3819, 4025),  # null, unique key, no default, check constraint
    *(1216, 1217, 1451, 1452, 1557, 1761),  # foreign keys
    *(1264, 1265, 1292, 1366, 1367, 1406, 1411, 1690, 1441),  # values that a type does not take
    *(3140, 3141, 3156, 3903),  # JSON
    *(1118, 1139, 1153, 1301, 1713),  # rows that are too large
    *(1526, 1748),  # no partition
    1644,  # SIGNAL of a trigger
}
_PRIVILEGE_CODES = {1044, 1142, 1143, 1227, 1370}
_MISMATCH_CODES = {1054, 1071, 1103, 1146, 1425, 1426, 1427}
_LOGIN_CODES = {1045, 1049, 1130, 1251, 1698, 2061, 3118}
_TEMPORARY_CODES = {
    *(1021, 1037, 1038, 1041, 1114, 1206),  # disk, memory, full tables
    *(1040, 1203, 1226),  # too many connections
    *(1053, 1077, 1158, 1159, 1160, 1161, 1184, 1927, 4166),  # the connection
    *(1205, 1213, 1317, 1412, 1684, 1969, 3024, 3058, 3572),  # locks, deadlocks, time
    *(1290, 1792, 1836, 3100),  # read-only, as after a failover
    *(2002, 2003, 2006, 2013, 2014, 2027, 2055),
}


# Values


def mysql_type(kind: pa.DataType) -> str:
    """Return the type of a column that is not part of the key."""
    if kind in _PLAIN_TYPES:
        return _PLAIN_TYPES[kind]
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "datetime(6)"
    if pa.types.is_time(kind):
        return "time(6)"
    return "bigint" if pa.types.is_duration(kind) else "longtext"


_PLAIN_TYPES = {
    pa.bool_(): "boolean",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "longtext",
    pa.binary(): "longblob",
    pa.date32(): "date",
}


def literals(column: pa.Array) -> pa.StringArray:
    """Return the SQL literal of each value of a column."""
    return pc.fill_null(_literals(column), "NULL")


def _literals(column: pa.Array) -> pa.StringArray:
    kind = column.type
    if pa.types.is_boolean(kind):
        return column.cast(pa.int8()).cast(pa.string())
    if pa.types.is_integer(kind):
        return column.cast(pa.string())
    if pa.types.is_floating(kind):
        return _quoted(column.cast(pa.float64()).cast(pa.string()))
    if pa.types.is_decimal(kind):
        return pc.utf8_trim(json_text(column), characters='"')
    if pa.types.is_duration(kind):
        return column.cast(pa.int64()).cast(pa.string())
    if pa.types.is_binary(kind):
        texts = [None if value is None else f"X'{value.hex()}'" for value in column.to_pylist()]
        return pa.array(texts, pa.string())
    if pa.types.is_timestamp(kind):
        naive = column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64()).cast(pa.timestamp("us"))
        return _quoted(naive.cast(pa.string()))
    if pa.types.is_temporal(kind):
        return _quoted(time_text(column))
    if pa.types.is_string(kind):
        return _quoted(column)
    return _quoted(nested_text(column) if pa.types.is_nested(kind) else json_text(column))


def _quoted(text: pa.StringArray) -> pa.StringArray:
    for plain, escaped in (("\\", "\\\\"), ("'", "\\'")):
        text = pc.replace_substring(text, plain, escaped)
    return pc.binary_join_element_wise("'", text, "'", "")


def _joined(*parts: Any) -> pa.StringArray:
    return pc.binary_join_element_wise(*parts, "")


def _quote(text: str) -> str:
    (quoted,) = _quoted(pa.array([text])).to_pylist()
    return str(quoted)


def row_literals(rows: pa.Table) -> pa.StringArray:
    """Return each row as it stands in a statement: `(7, 'ada', NULL)`."""
    columns = [literals(column.combine_chunks()) for column in rows.columns]
    return _joined("(", pc.binary_join_element_wise(*columns, ", "), ")")


def from_mysql(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return a column from the texts that the server sends."""
    if pa.types.is_nested(kind):
        return nested_array(values, kind)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return pa.array(values, kind)
    texts = pa.array(values, pa.string())
    if pa.types.is_boolean(kind):
        return texts.cast(pa.int64()).cast(kind)
    if pa.types.is_floating(kind):
        return texts.cast(pa.float64()).cast(kind)
    if pa.types.is_timestamp(kind):
        return texts.cast(pa.timestamp("us")).cast(kind)
    if pa.types.is_duration(kind):
        return texts.cast(pa.int64()).cast(kind)
    return time_array(texts, kind) if pa.types.is_temporal(kind) else texts.cast(kind)


_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31
_DAY_US = 86_400_000_000


def storable(column: pa.Array) -> pa.BooleanArray:
    """Return which values a column of the database can have."""
    kind = column.type
    if pa.types.is_floating(kind):
        fits = pc.is_finite(column)
    elif pa.types.is_date(kind):
        days = column.cast(pa.int32())
        fits = pc.and_(pc.greater_equal(days, _FIRST_DAY), pc.less_equal(days, _LAST_DAY))
    elif pa.types.is_timestamp(kind):
        at_us = column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
        fits = pc.and_(
            pc.greater_equal(at_us, _FIRST_DAY * _DAY_US),
            pc.less(at_us, (_LAST_DAY + 1) * _DAY_US),
        )
    else:
        return pa.array(np.ones(len(column), bool))
    return pc.fill_null(fits, True)


# Columns of a table that the user has made


@dataclass(frozen=True)
class _Column:
    name: str
    data_type: str
    column_type: str
    collation: str | None
    scale: int
    fraction_digits: int

    def changes_silently(self, kind: pa.DataType) -> bool:
        """Return whether the column rounds, cuts or pads values of a type without an error."""
        data_type = self.data_type
        if pa.types.is_decimal(kind):
            is_exact = data_type == "decimal" and self.scale >= kind.scale
            return data_type in _NUMBERS and not (
                is_exact or (kind.scale == 0 and data_type in _INTEGERS)
            )
        if pa.types.is_floating(kind):
            return data_type in _NUMBERS - {"double"} and not (
                data_type == "float" and kind == pa.float32()
            )
        if pa.types.is_integer(kind):
            return data_type in {"float", "double"} and kind.bit_width > (
                16 if data_type == "float" else 32
            )
        if pa.types.is_timestamp(kind):
            return data_type in {"date", "time", "year"} or (
                data_type in {"datetime", "timestamp"} and self.fraction_digits < 6
            )
        if pa.types.is_time(kind):
            return data_type == "time" and self.fraction_digits < 6
        return data_type == ("binary" if pa.types.is_binary(kind) else "char")

    @property
    def compares_bytes(self) -> bool:
        return self.collation is None or self.collation in {*_BINARY_COLLATIONS, "binary"}


_INTEGERS = {"tinyint", "smallint", "mediumint", "int", "bigint"}
_NUMBERS = {*_INTEGERS, "decimal", "float", "double"}


# Connections and errors


@contextmanager
def driver_errors() -> Iterator[None]:
    """Translate the driver's errors by what can be done about them."""
    try:
        yield
    except pymysql.err.Error as error:
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        text = f"The database: {error.args[-1] if error.args else error}"
        if code in _LOGIN_CODES:
            raise ConfigurationError(
                f"The database refuses the connection: {error.args[-1]}",
                fix=(
                    "check the URL, the database and the user; the password can be in the"
                    " environment's MYSQL_PWD."
                ),
            ) from error
        if code in _PRIVILEGE_CODES or code in _MISMATCH_CODES:
            raise TargetMismatch(
                text,
                fix=(
                    "make the table as the topic needs it, or grant what is missing (GRANT SELECT,"
                    " INSERT, UPDATE, DELETE on the table and on _headrace_sinks, and CREATE"
                    " TEMPORARY TABLES if the table has further unique indexes); then start the"
                    " sink again."
                ),
            ) from error
        if code in _TEMPORARY_CODES or code == 0:
            raise TargetUnavailable(
                text, fix="see that the server runs, can be reached and has room."
            ) from error
        raise ConfigurationError(text, fix="see what the server's log says about it.") from error
    except OSError as error:
        raise TargetUnavailable(
            f"The connection to the database is lost: {error}.",
            fix="see that the server runs and can be reached.",
        ) from error
    except RuntimeError as error:  # MySQL's default authentication, without TLS
        if "cryptography" not in str(error):
            raise
        raise ConfigurationError(
            f"The database's authentication needs another package: {error}.",
            fix="pip install cryptography; or connect with TLS: …/DATABASE?ssl_ca=PATH.",
        ) from error


def _identifier(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _identifiers(names: Sequence[str], prefix: str = "") -> str:
    return ", ".join(prefix + _identifier(name) for name in names)


class MysqlTarget(Target):
    def __init__(self, sink: SinkSpec, shape: TargetShape, db: Any) -> None:
        super().__init__(sink, shape)
        self._db = db
        database, _, table = self.table.rpartition(".") if sink.table else ("", "", self.table)
        database = database or str(connection_settings(sink.options["url"])["database"])
        self._name = f"{_identifier(database)}.{_identifier(table)}"
        self._where_table = f"table_schema = {_quote(database)} AND table_name = {_quote(table)}"
        self._where_ledger = f"WHERE target = {_quote(self._name)}"
        self._max_packet_bytes = 0
        self._needs_staging: bool | None = None
        """Whether the table has another unique index; None until this commit has looked."""
        self._has_staging = False

    @classmethod
    def open(cls, sink: SinkSpec, shape: TargetShape) -> Self:
        """Connect to the database."""
        with driver_errors():
            db = pymysql.connect(
                **connection_settings(sink.options["url"]),
                autocommit=True,
                connect_timeout=CONNECT_S,
                read_timeout=STATEMENT_S,
                write_timeout=STATEMENT_S,
                init_command=_SESSION,
                conv=dict(pymysql.converters.encoders),  # none to decode: values arrive as text
            )
        return cls(sink, shape, db)

    def close(self) -> None:
        with suppress(pymysql.err.Error, OSError):
            self._db.close()

    def _execute(self, statement: str | bytes) -> list[tuple[Any, ...]]:
        with self._db.cursor() as cursor:
            cursor.execute(statement)
            return [tuple(row) for row in cursor.fetchall()]

    # The table

    def prepare(self) -> None:
        with driver_errors():
            self._execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            if "mariadb" in self._db.get_server_info().lower():
                self._execute(f"SET idle_transaction_timeout = {IDLE_TRANSACTION_S}")
            ((longest,),) = self._execute("SELECT @@max_allowed_packet")
            self._max_packet_bytes = int(longest) - _STATEMENT_BYTES * len(self.shape.schema)
            with self._lock():
                existing = self._columns()
                if not existing:
                    self._create()
                else:
                    self._check_kind_of_table()
                    for field in self.shape.schema:
                        self._prepare_column(field, existing)
                    self._check_key()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold a lock on the target's name, so that two processes do not create it at once: DDL
        ends a transaction.
        """
        digest = hashlib.sha256(self._name.encode()).hexdigest()[:24]
        ((is_held,),) = self._execute(f"SELECT GET_LOCK('headrace.{digest}', {LOCK_WAIT_S})")
        if is_held != "1":
            raise TargetUnavailable(
                f"Another process prepares the table {self.table!r}.", fix="nothing: wait for it."
            )
        try:
            yield
        finally:
            with suppress(pymysql.err.Error, OSError):
                self._execute(f"SELECT RELEASE_LOCK('headrace.{digest}')")

    def begin(
        self, owner: int, *, resume: bool = False, start_over: bool = False
    ) -> SinkCheckpoint:
        with driver_errors(), self._lock():
            self._prepare_ledger()
        return super().begin(owner, resume=resume, start_over=start_over)

    def _has_ledger(self) -> bool:
        return bool(
            self._execute(
                "SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND"
                f" table_name = '{CHECKPOINT_TABLE}'"
            )
        )

    def _prepare_ledger(self) -> None:
        """Create the table of checkpoints, and an empty checkpoint, which a commit can lock."""
        if not self._has_ledger():  # so that a user who may not create tables can use it
            self._execute_ddl(
                f"CREATE TABLE IF NOT EXISTS {CHECKPOINT_TABLE} (target varchar(300) CHARACTER SET"
                " utf8mb4 COLLATE utf8mb4_bin PRIMARY KEY, applied longtext NOT NULL)"
                " ENGINE=InnoDB"
            )
        if not self._execute(f"SELECT 1 FROM {CHECKPOINT_TABLE} {self._where_ledger}"):
            self._execute(f"INSERT INTO {CHECKPOINT_TABLE} VALUES ({_quote(self._name)}, '')")

    def _columns(self) -> dict[str, _Column]:
        rows = self._execute(
            "SELECT column_name, data_type, column_type, collation_name, coalesce(numeric_scale,"
            " 0), coalesce(datetime_precision, 0) FROM information_schema.columns WHERE"
            f" {self._where_table}"
        )
        return {
            row[0]: _Column(row[0], row[1].lower(), row[2], row[3], int(row[4]), int(row[5]))
            for row in rows
        }

    def _create(self) -> None:
        columns = ", ".join(
            f"{_identifier(field.name)} {self._column_type(field)}" for field in self.shape.schema
        )
        statement = (
            f"CREATE TABLE {self._name} ({columns}, PRIMARY KEY"
            f" ({_identifiers(self.shape.key)})) ENGINE=InnoDB"
        )
        if not self.sink.create:
            raise TargetMismatch(
                f"There is no table {self.table!r} in the database.",
                fix=f"create=True (leave out --no-create), or: {statement}",
            )
        # A table that was dropped is filled from the beginning. The checkpoint goes first: between
        # the two statements there is neither.
        if self._has_ledger():
            self._execute(f"UPDATE {CHECKPOINT_TABLE} SET applied = '' {self._where_ledger}")
        self._execute_ddl(statement)

    def _column_type(self, field: pa.Field) -> str:
        """Return the definition of a column: text is compared by its bytes, and a key is short
        enough for an index.
        """
        is_key = field.name in self.shape.key
        kind = mysql_type(field.type)
        if is_key and kind in {"longtext", "longblob"}:
            variable = [
                name
                for name in self.shape.key
                if mysql_type(self.shape.schema.field(name).type) in {"longtext", "longblob"}
            ]
            fixed = len(self.shape.key) - len(variable)
            length = (MAX_KEY_BYTES - fixed * _FIXED_KEY_BYTES) // len(variable)
            kind = f"varchar({length // 4})" if kind == "longtext" else f"varbinary({length})"
        if kind.startswith(("longtext", "varchar")):
            kind += f" CHARACTER SET utf8mb4 COLLATE {self._binary_collation()}"
        return f"{kind} NOT NULL" if is_key else kind

    def _binary_collation(self) -> str:
        names = ", ".join(map(_quote, _BINARY_COLLATIONS))
        found = self._execute(
            "SELECT collation_name FROM information_schema.collations WHERE collation_name IN"
            f" ({names})"
        )
        if not found:
            raise ConfigurationError(
                f"The server has neither of the collations {names}, which tell 'a' from 'a '.",
                fix="use MariaDB 10.2 or MySQL 8.0.17, or newer ones.",
            )
        return str(found[0][0])

    def _execute_ddl(self, statement: str) -> None:
        try:
            self._execute(statement)
        except pymysql.err.Error as error:
            if error.args[0] in _PRIVILEGE_CODES:
                raise TargetMismatch(
                    f"The database: {error.args[-1]}.",
                    fix=(
                        f"as a user that may, run: {statement}; and GRANT SELECT, INSERT, UPDATE,"
                        " DELETE on it to this one."
                    ),
                ) from error
            raise

    def _check_kind_of_table(self) -> None:
        """Raise TargetMismatch unless the table takes part in transactions."""
        rows = self._execute(
            "SELECT coalesce(t.engine, t.table_type), coalesce(e.transactions, 'NO') FROM"
            " information_schema.tables t LEFT JOIN information_schema.engines e ON e.engine ="
            f" t.engine WHERE {self._where_table}"
        )
        if rows and rows[0][1] != "YES":
            raise TargetMismatch(
                f"{self.table!r} is a table without transactions ({rows[0][0]}): rows and"
                " checkpoint could not be committed together.",
                fix=f"ALTER TABLE {self._name} ENGINE=InnoDB, or choose another table.",
            )

    def _prepare_column(self, field: pa.Field, existing: dict[str, _Column]) -> None:
        found = existing.get(field.name)
        wanted = self._column_type(field)
        if found is None:
            statement = f"ALTER TABLE {self._name} ADD COLUMN {_identifier(field.name)} {wanted}"
            if not self.sink.create:
                raise TargetMismatch(
                    f"The table {self.table!r} has no column {field.name!r}:"
                    f" {nearest(field.name, existing)}",
                    fix=f"create=True (leave out --no-create), or: {statement}",
                )
            self._execute_ddl(statement)
            return
        modify = f"ALTER TABLE {self._name} MODIFY {_identifier(field.name)} {wanted}"
        if found.changes_silently(field.type):
            raise TargetMismatch(
                f"The column {field.name!r} of the table {self.table!r} is {found.column_type}, to"
                f" which the database changes values of {type_name(field.type)} without an error.",
                fix=modify,
            )
        if field.name in self.shape.key and not found.compares_bytes:
            raise TargetMismatch(
                f"The key {field.name!r} of the table {self.table!r} has the collation"
                f" {found.collation}, which takes different keys for one, such as 'a' and 'A', or"
                " 'a' and 'a '.",
                fix=modify,
            )

    def _unique_indexes(self) -> list[set[str | None]]:
        """Return the columns of each unique index; None for one that is indexed in part only."""
        rows = self._execute(
            "SELECT index_name, column_name, sub_part FROM information_schema.statistics WHERE"
            f" {self._where_table} AND non_unique = 0"
        )
        indexes: dict[str, set[str | None]] = {}
        for index, column, sub_part in rows:
            indexes.setdefault(index, set()).add(column if sub_part is None else None)
        return list(indexes.values())

    def _check_key(self) -> None:
        if set(self.shape.key) not in self._unique_indexes():
            raise TargetMismatch(
                f"The table {self.table!r} has no primary key or unique index on"
                f" {', '.join(self.shape.key)}, by which it would be merged.",
                fix=f"ALTER TABLE {self._name} ADD PRIMARY KEY ({_identifiers(self.shape.key)})",
            )

    # A commit

    @contextmanager
    def atomic(self) -> Iterator[None]:
        with driver_errors():
            self._needs_staging = None
            self._execute("START TRANSACTION")
            try:
                yield
                self._execute("COMMIT")
            except BaseException:
                with suppress(pymysql.err.Error, OSError):
                    self._execute("ROLLBACK")
                raise

    def read_checkpoint(self) -> SinkCheckpoint | None:
        return self._read_checkpoint("FOR UPDATE")

    def _read_checkpoint(self, lock: str) -> SinkCheckpoint | None:
        rows = self._execute(f"SELECT applied FROM {CHECKPOINT_TABLE} {self._where_ledger} {lock}")
        return SinkCheckpoint.from_json(rows[0][0]) if rows and rows[0][0] else None

    def write_checkpoint(self, checkpoint: SinkCheckpoint) -> None:
        self._execute(
            f"INSERT INTO {CHECKPOINT_TABLE} VALUES ({_quote(self._name)},"
            f" {_quote(checkpoint.to_json())}) ON DUPLICATE KEY UPDATE applied = VALUES(applied)"
        )

    def clear(self) -> None:
        self._execute(f"DELETE FROM {self._name}")

    def merge(self, batch: SinkBatch) -> list[Refusal]:
        refused: list[Refusal] = []
        limit = min(MAX_STATEMENT_BYTES, self._max_packet_bytes)
        if batch.deletes.num_rows:
            conditions = self._key_conditions(batch.deletes)
            for start, length in _slices(conditions, limit, _KEYS_PER_STATEMENT):
                part = batch.delete_offsets.slice(start, length)
                bisect_refused(_sql(conditions, start, length), part, self._delete, refused)
        rows, offsets = _storable_rows(batch.upserts, batch.upsert_offsets, refused)
        if rows.num_rows:
            texts = row_literals(rows)
            for start, length in _slices(texts, limit, rows.num_rows):
                part = offsets.slice(start, length)
                bisect_refused(_sql(texts, start, length), part, self._upsert, refused)
        return refused

    def _key_conditions(self, keys: pa.Table) -> pa.StringArray:
        """Return for each key the condition under which a row has it."""
        parts = [
            _joined(f"{_identifier(name)} = ", literals(keys[name].combine_chunks()))
            for name in self.shape.key
        ]
        return _joined("(", pc.binary_join_element_wise(*parts, " AND "), ")")

    def _delete(self, conditions: pa.Table) -> None:
        self._attempt(f"DELETE FROM {self._name} WHERE {_join(conditions['sql'], ' OR ')}")

    def _upsert(self, rows: pa.Table) -> None:
        size = pc.sum(pc.binary_length(rows["sql"])).as_py()
        if rows.num_rows == 1 and size > self._max_packet_bytes:
            raise RowsRefused(
                f"the row takes {size:,} bytes in a statement, and the server's max_allowed_packet"
                f" leaves {self._max_packet_bytes:,}"
            )
        if self._needs_staging is None:
            self._execute(f"SELECT 1 FROM {self._name} LIMIT 0")  # its indexes stay from here on
            key = set(self.shape.key)
            self._needs_staging = any(not key <= index for index in self._unique_indexes())
        if self._needs_staging:
            self._upsert_from_staging(rows)
            return
        assigned = self.shape.values or [self.shape.key[0]]
        assignments = ", ".join(
            f"{_identifier(name)} = VALUES({_identifier(name)})" for name in assigned
        )
        self._attempt(
            f"INSERT INTO {self._name} ({_identifiers(self.shape.schema.names)}) VALUES"
            f" {_join(rows['sql'], ', ')} ON DUPLICATE KEY UPDATE {assignments}"
        )

    def _upsert_from_staging(self, rows: pa.Table) -> None:
        """Update the rows whose keys exist, and insert the others."""
        columns = _identifiers(self.shape.schema.names)
        if not self._has_staging:
            self._execute_ddl(
                f"CREATE TEMPORARY TABLE {_STAGING} AS SELECT {columns} FROM {self._name} LIMIT 0"
            )
            self._has_staging = True
        same = " AND ".join(
            f"target.{name} = staged.{name}" for name in map(_identifier, self.shape.key)
        )
        self._execute(f"DELETE FROM {_STAGING}")
        self._execute("SAVEPOINT headrace")
        try:
            self._attempt(f"INSERT INTO {_STAGING} ({columns}) VALUES {_join(rows['sql'], ', ')}")
            if self.shape.values:
                assignments = ", ".join(
                    f"target.{name} = staged.{name}" for name in map(_identifier, self.shape.values)
                )
                self._attempt(
                    f"UPDATE {_STAGING} AS staged STRAIGHT_JOIN {self._name} AS target ON {same}"
                    f" SET {assignments}"
                )
            self._attempt(
                f"INSERT INTO {self._name} ({columns}) SELECT"
                f" {_identifiers(self.shape.schema.names, 'staged.')} FROM {_STAGING} AS staged"
                f" LEFT JOIN {self._name} AS target ON {same} WHERE"
                f" target.{_identifier(self.shape.key[0])} IS NULL"
            )
        except RowsRefused:
            self._execute("ROLLBACK TO SAVEPOINT headrace")
            raise

    def _attempt(self, statement: str) -> None:
        """Execute a statement. One that fails leaves nothing behind."""
        try:
            self._execute(statement.encode())
        except pymysql.err.Error as error:
            if error.args and error.args[0] in _REFUSAL_CODES:
                raise RowsRefused(str(error.args[-1])) from error
            raise

    # Reading back

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        with driver_errors():
            self._execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            checkpoint = self._read_checkpoint("") if self._has_ledger() else None
            return checkpoint, self._read_chunks()

    def as_stored(self, rows: pa.Table) -> pa.Table:
        """The server stores -0.0 as 0.0."""
        for index, field in enumerate(rows.schema):
            if pa.types.is_floating(field.type):
                zero = pa.scalar(0.0, field.type)
                rows = rows.set_column(index, field, pc.add(rows[field.name], zero))
        return rows

    def _read_chunks(self) -> Iterator[pa.Table]:
        """Yield all rows as the server sends them."""
        with driver_errors():
            with self._db.cursor(pymysql.cursors.SSCursor) as cursor:
                cursor.execute(f"SELECT {self._select_list()} FROM {self._name}")
                while rows := cursor.fetchmany(READ_ROWS):
                    yield convert_readable(rows, self._table, self.unreadable.add)
            self._execute("COMMIT")

    def lookup(self, keys: pa.Table) -> pa.Table:
        conditions = self._key_conditions(keys)
        rows: list[tuple[Any, ...]] = []
        with driver_errors():
            for start in range(0, len(conditions), _KEYS_PER_STATEMENT):
                part = conditions.slice(start, _KEYS_PER_STATEMENT)
                rows += self._execute(
                    f"SELECT {self._select_list()} FROM {self._name} WHERE {_join(part, ' OR ')}"
                )
        return convert_readable(rows, self._table, refuse_unreadable)

    def _select_list(self) -> str:
        """Return the columns to select. FLOAT alone would be sent with six digits only."""
        return ", ".join(
            _identifier(field.name) + (" * 1e0" if pa.types.is_floating(field.type) else "")
            for field in self.shape.schema
        )

    def _table(self, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(self.shape.schema)
        arrays = [
            from_mysql(list(values), field.type)
            for values, field in zip(columns, self.shape.schema, strict=True)
        ]
        return pa.table(arrays, schema=self.shape.schema)


def _storable_rows(
    rows: pa.Table, offsets: pa.Table, refused: list[Refusal]
) -> tuple[pa.Table, pa.Table]:
    """Return the rows whose values the database has, and refuse the others."""
    for name in rows.column_names:
        fits = storable(rows[name].combine_chunks())
        if pc.all(fits, min_count=0).as_py():
            continue
        what = (
            "NaN and infinity do not exist in the database"
            if pa.types.is_floating(rows.schema.field(name).type)
            else "the database has years 1 to 9999 only"
        )
        refused += refusals(offsets.filter(pc.invert(fits)), f"column {name!r}: {what}")
        rows, offsets = rows.filter(fits), offsets.filter(fits)
    return rows, offsets


def _slices(texts: pa.StringArray, limit: int, max_count: int) -> Iterator[tuple[int, int]]:
    """Cut texts into runs of at most `limit` bytes and `max_count` texts, of one text at least.
    Yields the start and the length of each.
    """
    sizes = (
        pc.binary_length(texts).to_numpy(zero_copy_only=False).astype(np.int64) + 4
    )  # with what separates two
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + limit, side="right")), start + 1)
        stop = min(stop, start + max_count)
        yield start, stop - start
        start = stop


def _sql(texts: pa.StringArray, start: int, length: int) -> pa.Table:
    return pa.table({"sql": texts.slice(start, length)})


def _join(texts: pa.Array | pa.ChunkedArray, separator: str) -> str:
    return separator.join(texts.to_pylist())
