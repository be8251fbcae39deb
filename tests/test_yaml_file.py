"""Files that people wrote, and got wrong: one line says what and where."""

import pytest

from holdfast.errors import ConfigError
from holdfast.yaml_file import FILE_BYTES_MAX, read_mapping


def test_a_mapping_comes_as_it_is(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("a: {b: [1, 2]}\nc: &c {d: 1}\ne: *c\n")
    assert read_mapping(str(file)) == {"a": {"b": [1, 2]}, "c": {"d": 1}, "e": {"d": 1}}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "holds nothing; write key: value lines"),
        (b"# only words\n", "holds nothing; write"),
        (b"- 1\n", "holds a list; write"),
        (b"just words", "holds plain text; write"),
        (b"3", "holds one value; write"),
        (b"tiers: [\n", "cannot be read as YAML: line 2, column 1: expected the node content"),
        (b"a: 1\n? [1, 2]\n: 3\n", "line 2, column 3: found unhashable key; correct it"),
        (b"!!python/object:os.system {}", "line 1, column 1: could not determine a constructor"),
        (b"a: 2024-13-45", "cannot be read as YAML: month must be in 1..12; correct it"),
        (b"a: 1\n---\nb: 2\n", "line 2, column 1: but found another document; correct it"),
        (b"a: 1\nb: 2\na: 3\n", "line 3: 'a' is there twice; remove one"),
        (b"a: {b: {c: 1, c: 2}}\n", "line 1: 'c' is there twice; remove one"),
        (b"a: 1\n<<: *x\n", "line 2, column 5: found undefined alias 'x'; correct it"),
        (b"[" * 100_000, "line 1, column 65: brackets nested more than 64 deep"),
        (b"a: " + b"[" * 65 + b"]" * 65, "line 1, column 68: brackets nested more than 64 deep"),
        (b"- " * 5_000, "nested too deep"),
        (b"\xff\xfe", "is not text in UTF-8; name another file"),
        (b"a\0b", "cannot be read as YAML: unacceptable character #x0000"),
        (b"#" * (FILE_BYTES_MAX + 1), f"has more than {FILE_BYTES_MAX} bytes; name another"),
    ],
)
def test_an_invalid_file_is_a_one_line_error(tmp_path, data, words):
    file = tmp_path / "a.yaml"
    file.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_mapping(str(file))
    assert str(caught.value).startswith(f"{file}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error_with_its_reason(tmp_path):
    for name, words in (
        ("none", "No such file or directory"),
        ("", "not a regular file, but a directory"),
    ):
        with pytest.raises(ConfigError, match=f"cannot be read: {words}; name another file"):
            read_mapping(str(tmp_path / name))


def test_an_alias_of_an_alias_costs_next_to_nothing(tmp_path):
    file = tmp_path / "bomb.yaml"
    lines = ["a0: &a0 [1]"] + [f"a{i}: &a{i} [{f'*a{i - 1},' * 10}]" for i in range(1, 40)]
    file.write_text("\n".join(lines))
    assert len(read_mapping(str(file))) == 40
