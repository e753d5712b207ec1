"""The example of a sink from outside the package: it passes the suite that every sink passes, with
a program that listens on a Unix socket and remembers what it got.
"""

import json
import socketserver
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from plugins.headrace_unix import headrace_unix

import headrace as hr
from headrace.errors import NotSupported
from headrace.log.dead_letters import read_dead_letters
from headrace.sinks.checkpoint import SinkCheckpoint
from headrace.testing.sink_contract import SinkContract, account, caught_up
from headrace.testing.strikes import StrikePoint
from headrace.types.json_codec import decode_rows


class Program:
    """Has the newest row of each key, or all rows, by their ids."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tables: dict[str, dict[str, dict[str, Any]]] = {}
        self.refuses: Any = lambda _row: False
        program = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                group: list[dict[str, Any]] = []
                for line in self.rfile:
                    if line.strip():
                        group.append(json.loads(line))
                        continue
                    self.wfile.write(program.take(group).encode() + b"\n")
                    group = []

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        self.server = Server(path, Handler)
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self.thread.start()

    def take(self, group: list[dict[str, Any]]) -> str:
        if any(self.refuses(each["row"]) for each in group):
            return "refused it is not wanted"
        for each in group:
            row, change = each["row"], each["change"]
            topic, partition, offset = each["id"].rsplit("-", 2)
            if change == "insert":
                row = {"_partition": int(partition), "_offset": int(offset), **row}
                self.tables.setdefault(topic, {})[each["id"]] = row
                continue
            key = json.dumps(row.get("id", row.get("k")))
            self.tables.setdefault(topic, {})
            if change == "delete":
                self.tables[topic].pop(key, None)
            else:
                self.tables[topic][key] = row
        return "ok"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


PROGRAMS: dict[str, Program] = {}


class Readable(headrace_unix.UnixTarget):
    """One whose program can be asked what it has, which the suite wants to know."""

    @property
    def program(self) -> Program:
        return PROGRAMS[self.sink.options["path"]]

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        with self.atomic():
            applied = self.read_checkpoint()
        rows = self.program.tables.get(self.shape.topic_id or "", {})
        lines = [json.dumps(row).encode() for row in rows.values()]
        return applied, iter([pa.Table.from_batches([decode_rows(lines, self.shape.schema).batch])])

    def clear(self) -> None:
        super().clear()
        self.program.tables.pop(self.shape.topic_id or "", None)


@pytest.fixture
def program() -> Iterator[Program]:
    with tempfile.TemporaryDirectory() as directory:  # paths of sockets are short
        listening = Program(f"{directory}/program.sock")
        PROGRAMS[listening.path] = listening
        yield listening
        del PROGRAMS[listening.path]
        listening.stop()


class TestUnix(SinkContract):
    is_atomic = False
    points = (
        StrikePoint(headrace_unix.UnixTarget, "ask", "before"),
        StrikePoint(headrace_unix.UnixTarget, "ask", "after"),
    )

    @pytest.fixture
    def sink(self, program: Program) -> hr.sinks.Sink:
        return replace(headrace_unix.sink(f"unix:{program.path}", batch_rows=3), opener=Readable)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        opened.create_topic("payments", "id BIGINT, name STRING, amount DECIMAL(12, 2)")
        yield opened


def test_rows_that_are_refused_are_dead_letters_and_others_arrive(
    program: Program, log: hr.Log
) -> None:
    with log.producer("payments") as producer:
        producer.append([account(number) for number in range(6)])
    program.refuses = lambda row: row["id"] == 4
    sink = headrace_unix.sink(f"unix:{program.path}")
    assert caught_up(sink, log, "payments").status.refused == 1
    (letter,) = read_dead_letters(log, "payments.unix")
    assert letter["reason"] == "it is not wanted"
    (rows,) = program.tables.values()
    assert sorted(row["id"] for row in rows.values()) == [0, 1, 2, 3, 5]
    with pytest.raises(NotSupported, match="cannot be read back"):
        sink.check("payments", log=log.address)
