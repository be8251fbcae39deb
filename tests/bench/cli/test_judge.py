"""`holdfast judge`: figures, a signed record, and refusals before any work."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from holdfast.blocks.layout import Layout
from holdfast.cli import USAGE, main
from holdfast.client.local_model import portable_fingerprint
from holdfast.codec.gate import Difference, read_gate_record, why_refused
from holdfast_bench.cli import judge as command

MODEL = Path(__file__).parents[2] / "data" / "trained-model"
FINGERPRINT = "00112233445566778899aabbccddeeff"
KEY = bytes(range(32))


@pytest.fixture
def node(tmp_path):
    """The options that name a node's configuration, with the domain `acme`."""
    (tmp_path / "acme.key").touch(mode=0o600)
    (tmp_path / "acme.key").write_bytes(KEY)
    (tmp_path / "node.yaml").write_text(
        "listen: unix:///tmp/x.sock\n"
        "tiers: [{kind: host, capacity: 16 MiB}]\n"
        "domains: {acme: {key_file: acme.key, seal: false}}\n"
        "gates: gates\n"
    )
    return ["--config", str(tmp_path / "node.yaml"), "--domain", "acme"]


def judge(*options):
    return main(
        ["judge", "int8", "--model", str(MODEL), "--prompts", str(MODEL / "held_out.txt"), *options]
    )


def blocks_of(folder):
    """The fingerprint of the model's blocks of 128 tokens as `int8` leaves them."""
    layout = Layout.portable(layers=4, kv_heads=2, head_size=32, dtype="bfloat16", block_tokens=128)
    return portable_fingerprint(folder, layout).quantised("int8", 1)


FEW = ("--count", "2", "--coded-tokens", "128", "--judged-tokens", "16")


def test_a_record_is_signed_with_the_domains_secret_and_says_what_was_judged(
    node, tmp_path, capsys
):
    pytest.importorskip("transformers")
    blocks = blocks_of(MODEL)
    fingerprint = blocks.digest().hex()
    assert judge(*FEW, *node, "--fingerprint", fingerprint, "--json", "-") == 1
    file = tmp_path / "gates" / f"{fingerprint}.json"
    record = read_gate_record(file.read_bytes())
    assert file.stat().st_mode & 0o777 == 0o600
    assert (record.prompts, record.coded_tokens, record.judged_tokens) == (2, 128, 16)
    assert record.layout.block_tokens == 128
    assert why_refused(record, KEY, blocks).startswith("prompts is 2, fewer than 64; coded tokens")
    assert "not made with" in why_refused(record, bytes(32), blocks)
    told = capsys.readouterr()
    rows = {row["what"]: row for row in json.loads(told.out)["rows"]}
    assert rows["int8.kl"]["limit"] == rows["control.kl"]["value"] > 0
    assert rows["int8.kl"]["value"] == record.coded_difference.kl
    assert rows["int8.score"]["value"] == record.coded_difference.score
    assert rows["exact.score"]["value"] == record.control_difference.score > 0
    assert rows["int8.stored"]["value"] < 0.53
    assert "does not pass: prompts is 2, fewer than 64" in told.err


def test_a_record_of_a_folder_with_other_weights_permits_nothing(node, tmp_path, capsys):
    pytest.importorskip("transformers")
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    served, file = blocks_of(folder), tmp_path / "record.json"
    options = [*FEW, *node, "--fingerprint", served.digest().hex(), "--out", str(file)]
    assert judge(*options) == 1
    record = read_gate_record(file.read_bytes())
    assert "the judged model is '" in why_refused(record, KEY, served)
    assert judge(*options, "--model-digest", served.meaning.model) == 1
    record = read_gate_record(file.read_bytes())
    assert why_refused(record, KEY, served).startswith("prompts is 2")


def test_a_folder_without_safetensors_needs_the_digest_in_words(node, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    options = [*FEW, *node, "--fingerprint", FINGERPRINT, "--out", str(tmp_path / "record.json")]
    command = ["judge", "int8", "--model", str(folder), "--prompts", str(MODEL / "held_out.txt")]
    assert main([*command, *options]) == USAGE
    assert "has no safetensors files" in capsys.readouterr().err
    assert main([*command, *options, "--model-digest", "pinned"]) == 1
    assert read_gate_record((tmp_path / "record.json").read_bytes()).model == "pinned"


def test_the_table_shows_every_coding_that_was_asked_for(capsys):
    pytest.importorskip("transformers")
    assert judge(*FEW, "--beside") == 1
    shown = capsys.readouterr().out
    assert "2 prompts, 128 tokens coded and 16 judged of each" in shown
    for name in (
        "control (float32)",
        "int8",
        "int6, keys by channel",
        "fp8 e4m3",
        "int4, by token",
    ):
        assert name in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--coded-tokens", "130"], "--coded-tokens: 130 does not fill blocks of 128 tokens; writ"),
        (["--count", "0"], "--count: 0 is not at least 1"),
        (["--fingerprint", "12"], "--fingerprint: '12' is not 32 hex digits"),
        (["--out", "record.json"], "--out: a record names blocks; give their --fingerprint"),
        (["--json", "/no/folder/x.json"], "--json: cannot write"),
    ],
)
def test_a_wrong_option_is_refused_before_the_model_is_loaded(options, message, capsys):
    assert judge(*options) == USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "float99"], "--dtype: 'float99' is not one of bfloat16, float16, float32"),
        (["--dtype", "int8"], "--dtype: 'int8' is not one of bfloat16, float16, float32"),
        (["--device", "vacuum"], "--device: torch cannot use 'vacuum' here: "),
        (["--device", "cuda:99"], "--device: torch cannot use 'cuda:99' here: "),
    ],
)
def test_a_dtype_or_device_that_torch_does_not_have_is_refused(options, message, capsys):
    pytest.importorskip("transformers")
    assert judge(*FEW, *options) == USAGE
    assert message in capsys.readouterr().err


def test_a_control_whose_p99_is_zero_has_figures_and_a_verdict(monkeypatch, capsys):
    pytest.importorskip("transformers")
    control, worse = (
        Difference(1e-9, 0.0, 1.0, 0.0, 0.5, 0.1),
        Difference(1e-3, 1e-3, 1.0, 0.0, 0.5, 0.1),
    )

    def judged(_model, prompts, lengths, coders, _show):
        coders["int8"].blocks = len(prompts) * lengths.coded
        return control, {"int8": worse}

    monkeypatch.setattr(command, "judge", judged)
    assert judge(*FEW) == 1
    shown = capsys.readouterr()
    assert "inf" in shown.out
    assert "KL p99 is 0.001, more than 2 times the control's 0" in shown.err


def test_a_domain_without_a_key_is_refused(node, capsys):
    assert judge(*node[:2], "--domain", "other", "--fingerprint", FINGERPRINT) == USAGE
    assert "domain 'other' has no key here; configured are: acme" in capsys.readouterr().err


def test_a_configuration_without_a_folder_for_records_is_refused(node, capsys):
    assert judge(*node, "--set", "gates=", "--fingerprint", FINGERPRINT) == USAGE
    assert "no folder for gate records; set gates, or a disk tier, or give --out" in (
        capsys.readouterr().err
    )


def test_without_transformers_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert judge() == USAGE
    assert "needs torch and transformers: pip install torch transformers" in (
        capsys.readouterr().err
    )
