"""Text that others wrote: encodings, byte order marks, line ends, and errors with file and line."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fovea.app.errors import is_user_error
from fovea.text_files import json_lines, read_json, read_text, text_lines


class OurError(ValueError):
    """What a caller asks for."""


LINES = ["one", "", "zwei\u2028\x0b\x85 \u00fc", "\U0001f600"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_marks_and_line_ends_make_no_difference(tmp_path, end, mark):
    path = tmp_path / "a.txt"
    path.write_bytes((mark + end.join(LINES)).encode())
    assert list(text_lines(path)) == [(1, "one\n"), (2, "\n"), (3, f"{LINES[2]}\n"), (4, LINES[3])]
    assert read_text(path) == "\n".join(LINES)
    path.write_bytes((mark + end.join(["", '{"a":', "1}"])).encode())
    assert read_json(path) == {"a": 1}
    path.write_bytes((mark + end.join(['{"a": 1}', "", "[2]"])).encode())
    assert list(json_lines(path)) == [(1, {"a": 1}), (3, [2])]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(
    before=st.lists(st.text(st.characters(exclude_categories=["C"]), max_size=5), max_size=3),
    byte=st.integers(128, 255),
)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_the_byte_that_is_no_utf_8_is_named(tmp_path, end, before, byte):
    path = tmp_path / "a.txt"
    path.write_bytes(end.join([*before, ""]).encode() + b"caf" + bytes([byte]) + b" " + end.encode() + b"x\xff")
    line = len(before) + 1
    with pytest.raises(OurError) as told:
        list(text_lines(path, OurError))
    expected = f"{path}, line {line}: not UTF-8 (byte 0x{byte:02x}, column 4); save it as UTF-8"
    assert str(told.value).startswith(expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}".encode("utf-16"), "a.json, line 1: not UTF-8 but UTF-16; save it as UTF-8"),
        ("{}\n{}".encode("utf-16-be"), "a.json, line 1: holds a zero byte; it is no text, or UTF-16"),
        (b'{"a": 1\n,', "a.json, line 2: not JSON (Expecting property name enclosed in double quotes, column 2)"),
        (b'{"a": {"x": 1, "y": 2, "x": 3}}', "a.json: an object has the name 'x' twice, as its entries 1 and 3; keep"),
        (b"[" * 100_000, "a.json: maximum recursion depth exceeded"),
    ],
)
def test_what_is_no_json_is_the_users_to_mend(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(OurError) as told:
        read_json(path, OurError)
    assert str(told.value).startswith(f"{tmp_path}/{message}")
    assert is_user_error(told.value)
    path.write_bytes(b"{}\n" + json.dumps("\u00e9", ensure_ascii=False).encode("latin-1"))
    with pytest.raises(OurError, match=r"a\.json, line 2: not UTF-8 \(byte 0xe9, column 2\)") as told:
        list(json_lines(path, OurError))
    assert is_user_error(told.value)


def test_a_line_is_named_where_json_ends_in_it(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{}\n{"a": 1, "a": 1}\n')
    with pytest.raises(OurError, match=r"a\.jsonl, line 2: an object has the name 'a' twice, as its entries 1 and 2"):
        list(json_lines(path, OurError))
    path.write_text('{}\n{}\n{"a"')
    with pytest.raises(OurError, match=r"a\.jsonl, line 3: not JSON \(Expecting ':' delimiter, column 5\)"):
        list(json_lines(path, OurError))


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(OurError, match=r"cannot be read \(Is a directory\)") as told:
        read_text(tmp_path, OurError)
    assert is_user_error(told.value)
