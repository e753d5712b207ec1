"""The servers that sinks write to; Postgres is started as for change capture."""

from tests.cdc.conftest import postgres, postgres_server

__all__ = ["postgres", "postgres_server"]
