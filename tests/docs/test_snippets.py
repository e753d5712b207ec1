"""What runs the snippets of README and guide notices what is wrong with them."""

from pathlib import Path

import pytest

from tests.docs.snippets import PROMISES, Page, Snippet, commands


def test_comments_behind_print_are_promises() -> None:
    promised = PROMISES.findall(
        "print(x)      # ['a'] …\nprint(y, {})      # 1.5 {}\nz = 1      # no promise\n"
    )
    assert promised == ["['a'] …", "1.5 {}"]


def test_a_script_is_its_commands() -> None:
    script = (
        "# about it\nheadrace topic list   # all\n\nfor n in 1 2; do\n  echo $n \\\n    more\ndone"
        " | cat\necho 'a\nb'\n"
    )
    assert list(commands(script)) == [
        "headrace topic list   # all",
        "for n in 1 2; do\n  echo $n \\\n    more\ndone | cat",
        "echo 'a\nb'",
    ]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("python", "assert False\n"),
        ("python", "print(1)  # 2\n"),
        ("bash", "false\ntrue\n"),
        ("bash", "true  # exits with 3\n"),
        ("bash", "headrace topic list --log file:/dev/null\n"),
        ("bash", "false | cat\n"),
        (
            "bash",
            (
                "bash -c 'echo here; trap \"exit 9\" INT; while true; do sleep 0.1; done'   # until"
                " Ctrl-C\n"
            ),
        ),
        ("bash", "true   # until Ctrl-C\n"),
        ("console", "$ echo a; echo c\na\nb\n"),
    ],
)
def test_a_snippet_that_fails_is_noticed(
    kind: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError):
        Page("broken.md").run([Snippet(kind, 1, text)])


def test_a_correct_page_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [
        Snippet("file=a.txt", 1, "first\n"),
        Snippet(
            "bash",
            1,
            "cat a.txt\nheadrace \\\n  --version   # on two lines\nfalse    # exits with 1\nbash -c"
            " 'echo here; trap \"exit 130\" INT; while true; do sleep 0.1; done'   # until"
            " Ctrl-C\n",
        ),
        Snippet("console", 1, "$ cat a.txt\nfirst\n\n$ echo one two three\none … three\n"),
    ]
    monkeypatch.chdir(tmp_path)
    Page("as-it-says.md").run(blocks)
