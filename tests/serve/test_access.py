"""Access control: this machine, its own pages, and elsewhere only requests with the token."""

from pathlib import Path

import pytest

from headrace.errors import ConfigurationError
from headrace.http.access import find_token
from headrace.serve.server import start
from headrace.views.store import ViewStore
from tests.serve.conftest import Client, Start

TOKEN = "a-token-of-some-length"
PATHS = ["/views", "/views/counts", "/views/counts/changes", "/metrics", "/openapi.json", "/health"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Host": "10.0.0.1"},
        {"Host": ""},
    ],
    ids=str,
)
def test_pages_of_other_origins_and_other_names_are_refused(
    client: Client, headers: dict[str, str]
) -> None:
    for path in PATHS:
        refused = client.get(path, headers=headers)
        assert refused.status == 403
        assert "access-control-allow-origin" not in refused.headers


def test_a_query_from_another_origin_is_refused_and_no_page_is_allowed(
    client: Client,
) -> None:
    headers = {"content-type": "application/json", "Origin": "https://evil.example"}
    assert client.ask("POST", "/sql", b'{"query": "SELECT 1"}', headers).status == 403
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert client.ask("OPTIONS", "/sql", None, asked).status == 403


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST"])
def test_own_pages_and_programs_may_send_requests(client: Client, name: str) -> None:
    host = f"{name}:{client.port}"
    for headers in (
        {},
        {"Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ):
        assert client.get("/views", headers={"Host": host, **headers}).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_but_sql_takes_anything_but_get(client: Client, method: str) -> None:
    for path in PATHS:
        assert client.ask(method, path).status == 405


# The token


def test_with_a_token_every_request_needs_it(serve: Start, store: ViewStore) -> None:
    client = Client(serve(token=TOKEN).port)
    for path in PATHS[:-1]:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": TOKEN},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": "Bearer "},
        ):
            refused = client.get(path, headers=headers)
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert client.get("/views", headers={"Authorization": f"Bearer {TOKEN}"}).status == 200
    assert client.get("/health").json == {"status": "ok"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.com"])
def test_listening_elsewhere_needs_a_token(state: Path, host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"would let everyone.*\n.*--token-file"):
        start(state, host=host)


def test_listening_elsewhere_with_a_token(serve: Start, store: ViewStore) -> None:
    client = Client(serve(host="0.0.0.0", token=TOKEN).port)
    assert client.get("/views", headers={"Host": "shop.example"}).status == 401
    assert (
        client.get(
            "/views", headers={"Host": "shop.example", "Authorization": f"Bearer {TOKEN}"}
        ).status
        == 200
    )
    assert (
        client.get(
            "/views", headers={"Origin": "https://evil.example", "Authorization": f"Bearer {TOKEN}"}
        ).status
        == 403
    )


def test_where_a_token_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert find_token(file, {"HEADRACE_TOKEN": "another-token-of-some-length"}) == TOKEN
    assert find_token(None, {"HEADRACE_TOKEN": TOKEN}) == TOKEN
    assert find_token(None, {}) is None
    for bad in ("", "short", "with blanks in the middle of it", "ünicode-ünicode-ünicode"):
        file.write_text(bad)
        with pytest.raises(ConfigurationError, match="does not have 16 or more"):
            find_token(file, {})
        with pytest.raises(ConfigurationError, match="HEADRACE_TOKEN does not have"):
            find_token(None, {"HEADRACE_TOKEN": bad})
    with pytest.raises(ConfigurationError, match="cannot be read"):
        find_token(tmp_path / "none", {})


def test_a_taken_port_is_named(serve: Start, state: Path, store: ViewStore) -> None:
    taken = serve().port
    with pytest.raises(
        ConfigurationError, match=rf"port {taken}: Address already in use\.\n.*--port"
    ):
        start(state, port=taken)


# The rest


def test_the_description_names_every_path(client: Client) -> None:
    described = client.get("/openapi.json").json
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            asked = client.ask(
                method.upper(), path.replace("{name}", "counts"), headers={"Last-Event-ID": "x"}
            )
            assert asked.status not in {404, 405} or "UnknownTopic" in asked.body.decode(), path
            assert str(asked.status) in operation["responses"], (path, asked.status)
    unknown = client.get("/view")
    assert (unknown.status, unknown.json["fix"]) == (404, "see /openapi.json for all paths.")


def test_health_without_views(serve: Start, state: Path) -> None:
    client = Client(serve().port)
    assert client.get("/health").status == 503
    assert "run the pipeline first" in client.get("/views").json["fix"]
