import json

import pytest

import holdfast
from holdfast.client.weights_digest import NoDigestError

LAYOUT = holdfast.Layout.portable(
    layers=2, kv_heads=2, head_size=8, dtype="bfloat16", block_tokens=16
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 1e4, "hidden_size": 64}))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def digest(folder, layout=LAYOUT, **options):
    return holdfast.portable_fingerprint(folder, layout, **options).digest()


def test_equal_files_in_another_folder_have_the_same_fingerprint(folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((folder / name).read_bytes())
    (copy / "README.md").write_text("not read")
    assert digest(folder) == digest(copy)


def test_weights_settings_overrides_name_and_data_type_change_the_fingerprint(folder):
    before = digest(folder)
    float16 = holdfast.Layout.portable(
        layers=2, kv_heads=2, head_size=8, dtype="float16", block_tokens=16
    )
    others = [
        digest(folder, name="release-7"),
        digest(folder, overrides={"rope_theta": 2e4}),
        digest(folder, float16),
    ]
    (folder / "model.safetensors").write_bytes(b"other weights")
    others.append(digest(folder))
    (folder / "config.json").write_text(json.dumps({"rope_theta": 2e4, "hidden_size": 64}))
    others.append(digest(folder))
    assert len({before, *others}) == len(others) + 1


def test_only_the_files_of_an_index_count(folder):
    (folder / "part.safetensors").write_bytes(b"of another format")
    both = digest(folder)
    index = {"weight_map": {"layer": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    one = digest(folder)
    (folder / "part.safetensors").write_bytes(b"changed")
    assert both != one == digest(folder)


def test_a_folder_without_settings_or_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(NoDigestError, match="has no safetensors files; set model_digest"):
        digest(folder)
    assert digest(folder, name="release-7")
    (folder / "config.json").unlink()
    with pytest.raises(NoDigestError, match=r"has no config\.json; name the folder"):
        digest(folder)
