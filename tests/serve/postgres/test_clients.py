"""Views by Postgres's protocol, asked by the clients that people have: psql, psycopg, asyncpg,
SQLAlchemy and pandas.
"""

import asyncio
import datetime as dt
import math
import re
import shutil
import subprocess
from decimal import Decimal
from typing import Any

import asyncpg
import pandas as pd
import psycopg
import pytest
import sqlalchemy

from tests.serve.postgres.conftest import AT, EU, SALES, Open, Site

Connection = psycopg.Connection[tuple[Any, ...]]
AS_PYTHON = {
    "clock": dt.time(1, 2, 3),
    "s": {"a": 1, "b": "x"},
    "m": {"k": 1},
}
"""Columns whose values psycopg gives in another form than they were stored from."""


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_every_type_comes_back_as_it_is_in_the_view(db: Connection, binary: bool) -> None:
    cursor = db.cursor(binary=binary)
    row = cursor.execute("SELECT * FROM sales WHERE region = %s", ["eu"]).fetchone()
    assert row is not None
    expected = dict(zip(SALES.names, EU, strict=True)) | AS_PYTHON
    assert dict(zip(SALES.names, row, strict=True)) == expected
    other = cursor.execute("SELECT * FROM sales WHERE region = 'us'").fetchone()
    assert other is not None
    assert math.isnan(other[1])
    assert other[2:] == (Decimal("-0.05"), *[None] * 16)


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
@pytest.mark.parametrize(
    "column", [name for name in SALES.names if name not in {"s", "m", "tiny", "took", "numbers"}]
)
def test_a_parameter_of_every_type_finds_its_row(db: Connection, column: str, binary: bool) -> None:
    value = dict(zip(SALES.names, EU, strict=True))[column]
    placeholder = "%b" if binary else "%t"
    query = f"SELECT region FROM sales WHERE {column} = {placeholder}"
    assert db.execute(query, [value]).fetchall() == [("eu",)]


def test_the_fast_path_and_the_engine_give_the_same_row(db: Connection) -> None:
    fast = db.execute("SELECT * FROM sales WHERE region = 'eu'").fetchall()
    assert fast == db.execute("SELECT * FROM sales WHERE region || '' = 'eu'").fetchall()
    assert db.execute("SELECT n, k FROM counts WHERE k = 7").fetchall() == [(70, 7)]
    assert db.execute("SELECT n FROM counts WHERE k = -7").fetchall() == []
    assert db.execute("SELECT n FROM counts WHERE k = %s", [7]).fetchall() == [(70,)]


def test_errors_have_the_codes_that_drivers_know(db: Connection) -> None:
    for query, kind in [
        ("SELECT nope FROM sales", psycopg.errors.UndefinedColumn),
        ("SELECT * FROM sale", psycopg.errors.UndefinedTable),
        ("SELEC 1", psycopg.errors.SyntaxError),
        ("SELECT * FROM sales WHERE", psycopg.errors.SyntaxError),
        ("INSERT INTO sales VALUES ('x')", psycopg.errors.ReadOnlySqlTransaction),
        ("DROP TABLE sales", psycopg.errors.ReadOnlySqlTransaction),
        ("SET nothing = 1", psycopg.errors.UndefinedObject),
        ("FETCH 1 FROM nobody", psycopg.errors.InvalidCursorName),
        ("SELECT * FROM read_csv('/etc/passwd')", psycopg.errors.UndefinedFunction),
        ("SELECT count(*) FROM counts AS OF 3", psycopg.errors.SyntaxError),
    ]:
        with pytest.raises(kind):
            db.execute(query)
    assert db.execute("SELECT count(*) FROM sales").fetchone() == (2,)


def test_a_failed_transaction_ends_with_a_rollback(db: Connection) -> None:
    db.execute("BEGIN")
    with pytest.raises(psycopg.errors.UndefinedColumn):
        db.execute("SELECT nope FROM sales")
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        db.execute("SELECT 1")
    db.execute("ROLLBACK")
    assert db.execute("SELECT 1").fetchone() == (1,)


def test_a_cursor_gives_rows_in_parts_and_ends_with_its_transaction(site: Site) -> None:
    with psycopg.connect(site.dsn()) as connection:
        with connection.cursor("parts") as cursor:
            cursor.execute("SELECT k FROM counts WHERE k < 10 ORDER BY k")
            assert cursor.fetchmany(3) == [(0,), (1,), (2,)]
            assert len(cursor.fetchall()) == 7
        connection.execute("DECLARE c CURSOR FOR SELECT 1")
        connection.commit()
        with pytest.raises(psycopg.errors.InvalidCursorName):
            connection.execute("FETCH 1 FROM c")


def test_settings_are_kept_and_have_their_effect(db: Connection) -> None:
    db.execute("SET TimeZone = 'America/New_York'")
    shown = db.execute("SELECT placed FROM sales WHERE region = 'eu'").fetchone()
    assert shown is not None
    assert shown[0] == AT
    assert shown[0].utcoffset() == dt.timedelta(hours=-4)
    assert db.execute("SHOW timezone").fetchone() == ("America/New_York",)
    db.execute("BEGIN")
    db.execute("SET LOCAL application_name = 'report'")
    db.execute("COMMIT")
    assert db.execute("SHOW application_name").fetchone() != ("report",)
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        db.execute("SET TimeZone = 'Mars/Olympus'")
    db.execute("DISCARD ALL")
    assert db.execute("SHOW TimeZone").fetchone() == ("UTC",)


def test_the_catalogue_describes_views_to_sqlalchemy_and_pandas(site: Site) -> None:
    url = f"postgresql+psycopg://analyst@127.0.0.1:{site.port}/shop"
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        inspector = sqlalchemy.inspect(connection)
        assert inspector.get_table_names() == ["counts", "sales", "secret"]
        columns = {each["name"]: each for each in inspector.get_columns("sales")}
        assert list(columns) == SALES.names
        assert str(columns["price"]["type"]) == "NUMERIC(10, 2)"
        assert str(columns["placed"]["type"]) == "TIMESTAMP"
        assert inspector.get_pk_constraint("sales")["constrained_columns"] == ["region"]
        assert inspector.get_foreign_keys("sales") == []
    frame = pd.read_sql_table("counts", engine)
    assert frame.shape == (100, 2)
    assert pd.read_sql("SELECT sum(n) AS total FROM counts", engine)["total"][0] == 49_500
    engine.dispose()


def test_asyncpg_prepares_describes_and_pages(site: Site) -> None:
    async def run() -> None:
        connection = await asyncpg.connect(
            host="127.0.0.1", port=site.port, user="analyst", database="shop"
        )
        row = await connection.fetchrow("SELECT * FROM sales WHERE region = $1", "eu")
        assert row["numbers"] == [1, None, -3]
        assert row["price"] == Decimal("100.00")
        found = await connection.fetch(
            "SELECT k FROM counts WHERE k = ANY($1::int[]) AND n > $2 ORDER BY k LIMIT $3",
            [3, 4, 5],
            30,
            1,
        )
        assert [each["k"] for each in found] == [4]
        statement = await connection.prepare("SELECT n FROM counts WHERE k BETWEEN $1 AND $2")
        assert [each.name for each in statement.get_parameters()] == ["int8", "int8"]
        async with connection.transaction():
            keys = [
                each["k"] async for each in connection.cursor("SELECT k FROM counts ORDER BY k")
            ]
        assert keys[:3] == [0, 1, 2]
        assert len(keys) >= 100
        await connection.close()

    asyncio.run(run())


def psql(site: Site, *commands: str) -> str:
    program = shutil.which("psql")
    if program is None:
        pytest.skip("psql is not installed")
    arguments = [part for command in commands for part in ("-c", command)]
    done = subprocess.run(
        [program, "-X", "-v", "ON_ERROR_STOP=1", site.dsn(), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_psql_lists_and_describes_the_views(site: Site) -> None:
    printed = psql(site, r"\dt", r"\d sales", r"\d+ counts", r"\l", r"\du", r"\dn", r"\di", r"\df")
    assert "public | counts | table" in printed
    assert re.search(r"price +\| numeric\(10,2\)", printed)
    assert '"sales_pkey" PRIMARY KEY, btree (region)' in printed
    assert "shop" in printed


def test_psql_copies_rows_as_lines(site: Site) -> None:
    assert psql(site, "COPY (SELECT k, n FROM counts WHERE k < 2 ORDER BY k) TO STDOUT") == (
        "0\t0\n1\t10\n"
    )
    assert "eu\t1.5\t100.00\t2026-07-31 12:30:00.25+00" in psql(site, "COPY sales TO STDOUT")


CATALOGUE_QUERIES = [
    # Written after what these clients ask when they connect, list tables and describe one.
    pytest.param(
        "SELECT CASE WHEN quote_ident(table_schema) IN (SELECT CASE WHEN trim(s[i]) = '\"$user\"'"
        " THEN user ELSE trim(s[i]) END FROM generate_series(array_lower(string_to_array("
        "current_setting('search_path'), ','), 1), array_upper(string_to_array("
        "current_setting('search_path'), ','), 1)) AS i, string_to_array("
        "current_setting('search_path'), ',') s) THEN quote_ident(table_name) ELSE"
        " quote_ident(table_schema) || '.' || quote_ident(table_name) END AS \"table\""
        " FROM information_schema.tables WHERE quote_ident(table_schema) NOT IN"
        " ('information_schema', 'pg_catalog') ORDER BY 1",
        3,
        id="grafana: tables",
    ),
    pytest.param(
        'SELECT column_name AS "column", data_type AS "type" FROM information_schema.columns'
        " WHERE table_name = 'sales' ORDER BY ordinal_position",
        19,
        id="grafana: columns",
    ),
    pytest.param(
        'SELECT n.nspname AS "schema", c.relname AS "name", CASE c.relkind WHEN \'r\' THEN'
        " 'TABLE' WHEN 'v' THEN 'VIEW' END AS \"type\", d.description, stat.n_live_tup AS"
        " estimated_row_count FROM pg_catalog.pg_class AS c INNER JOIN pg_catalog.pg_namespace AS"
        " n ON c.relnamespace = n.oid LEFT JOIN pg_catalog.pg_description AS d ON c.oid = d.objoid"
        " AND d.objsubid = 0 AND d.classoid = 'pg_class'::regclass LEFT JOIN"
        " pg_stat_user_tables AS stat ON n.nspname = stat.schemaname AND c.relname = stat.relname"
        " WHERE c.relnamespace = n.oid AND n.nspname !~ '^pg_' AND n.nspname <>"
        " 'information_schema' AND c.relkind IN ('r', 'p', 'v', 'f', 'm') ORDER BY 1, 2",
        3,
        id="metabase: tables",
    ),
    pytest.param(
        "SELECT result.TABLE_NAME, result.COLUMN_NAME, result.KEY_SEQ, result.PK_NAME FROM (SELECT"
        " n.nspname AS TABLE_SCHEM, ct.relname AS TABLE_NAME, a.attname AS COLUMN_NAME,"
        " (information_schema._pg_expandarray(i.indkey)).n AS KEY_SEQ, ci.relname AS PK_NAME,"
        " information_schema._pg_expandarray(i.indkey) AS KEYS, a.attnum AS A_ATTNUM FROM"
        " pg_catalog.pg_class ct JOIN pg_catalog.pg_attribute a ON (ct.oid = a.attrelid) JOIN"
        " pg_catalog.pg_namespace n ON (ct.relnamespace = n.oid) JOIN pg_catalog.pg_index i ON"
        " (a.attrelid = i.indrelid) JOIN pg_catalog.pg_class ci ON (ci.oid = i.indexrelid) WHERE"
        " true AND n.nspname = 'public' AND ct.relname = 'sales' AND i.indisprimary) result WHERE"
        " result.A_ATTNUM = (result.KEYS).x ORDER BY result.TABLE_NAME, result.PK_NAME,"
        " result.KEY_SEQ",
        1,
        id="jdbc: primary keys",
    ),
    pytest.param(
        "SELECT db.oid, db.* FROM pg_catalog.pg_database db WHERE datallowconn ORDER BY db.datname",
        1,
        id="dbeaver: databases",
    ),
    pytest.param(
        "SELECT c.oid, c.*, d.description, pg_catalog.pg_get_expr(c.relpartbound, c.oid) AS"
        " partition_expr FROM pg_catalog.pg_class c LEFT OUTER JOIN pg_catalog.pg_description d ON"
        " d.objoid = c.oid AND d.objsubid = 0 AND d.classoid = 'pg_class'::regclass WHERE"
        " c.relnamespace = 2200 AND c.relkind NOT IN ('i', 'I', 'c')",
        3,
        id="dbeaver: tables",
    ),
    pytest.param(
        "SELECT c.relname, a.*, pg_catalog.pg_get_expr(ad.adbin, ad.adrelid, true) AS"
        " def_value, dsc.description, dep.objid FROM pg_catalog.pg_attribute a INNER JOIN"
        " pg_catalog.pg_class c ON (a.attrelid = c.oid) LEFT OUTER JOIN pg_catalog.pg_attrdef ad"
        " ON (a.attrelid = ad.adrelid AND a.attnum = ad.adnum) LEFT OUTER JOIN"
        " pg_catalog.pg_description dsc ON (c.oid = dsc.objoid AND a.attnum = dsc.objsubid) LEFT"
        " OUTER JOIN pg_depend dep ON dep.refobjid = a.attrelid AND dep.deptype = 'i' AND"
        " dep.refobjsubid = a.attnum WHERE NOT a.attisdropped AND c.relkind NOT IN ('i', 'I', 'c')"
        " AND c.relname = 'sales' ORDER BY a.attnum",
        19,
        id="dbeaver: columns",
    ),
    pytest.param("SELECT version(), current_schema(), session_user", 1, id="names"),
    pytest.param("SELECT 'sales'::regclass::oid, 'sales'::regclass", 1, id="regclass"),
]


@pytest.mark.parametrize(("query", "rows"), CATALOGUE_QUERIES)
def test_what_tools_ask_the_catalogue_has_an_answer(db: Connection, query: str, rows: int) -> None:
    assert len(db.execute(query).fetchall()) == rows


def test_a_role_sees_only_its_views(open_site: Open, tmp_path: Any) -> None:
    roles = tmp_path / "roles.toml"
    roles.write_text('[roles.guest]\npassword = "guest password"\nviews = ["counts", "sal*"]\n')
    site = open_site(roles=roles)
    with site.connect(user="guest", password="'guest password'") as guest:
        assert guest.execute("SELECT count(*) FROM counts").fetchone() == (100,)
        listed = guest.execute("SELECT tablename FROM pg_tables ORDER BY 1").fetchall()
        assert listed == [("counts",), ("sales",)]
        for query in (
            "SELECT * FROM secret",
            "SELECT n FROM secret WHERE k = 1",
            "SELECT * FROM counts, public.secret",
            "SUBSCRIBE TO secret",
            "COPY secret TO STDOUT",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                guest.execute(query)
    for user, password in (("guest", "wrong"), ("nobody", "guest password"), ("guest", "")):
        with pytest.raises(psycopg.OperationalError, match="password"):
            site.connect(user=user, password=f"'{password}'")


def test_the_token_is_the_password_of_every_name(open_site: Open) -> None:
    site = open_site(token="a token that is long enough".replace(" ", "-"))
    with site.connect(password="a-token-that-is-long-enough") as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        site.connect(password="another-token-that-is-long")


def test_another_database_does_not_exist(site: Site) -> None:
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        site.connect(dbname="other")
