"""Whether the vLLM connector caches a model, as the commands say it."""

import json

import pytest

from holdfast.cli import main


@pytest.mark.parametrize(
    ("name", "ok", "says"),
    [
        ("Qwen3-8B", True, "the vLLM connector caches this model (full"),
        ("gpt-oss-20b", True, "the vLLM connector caches this model (sliding"),
        ("Qwen3.5-397B-A17B", True, "the vLLM connector caches this model (recurrent layers"),
        ("DeepSeek-V3.2", False, "does not cache this model yet (sparse"),
        ("/no/such/config.json", False, "not known whether the vLLM connector caches it: /no/such"),
    ],
)
def test_doctor_says_whether_vllm_caches_a_model(capsys, tmp_path, name, ok, says):
    found, status = examined(name, capsys, tmp_path)
    assert (found["ok"], says in found["why"]) == (ok, True)
    assert status == (ok is False)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Qwen3-8B", "vLLM, transformers and SGLang read each other's portable contexts"),
        ("Qwen3-8B", "exact blocks are found only at the tensor-parallel size that wrote them"),
        ("gpt-oss-20b", "vLLM and transformers read each other's portable contexts"),
        ("DeepSeek-V3", "portable: yes; latents on CPUs without AMX only"),
        ("Llama-4-Maverick-17B-128E-Instruct", "each engine reads its own portable contexts only"),
        ("Qwen3.5-397B-A17B", "portable blocks: no: each engine keeps states in a form of its own"),
    ],
)
def test_doctor_says_by_which_engines_and_ranks_a_context_is_read(capsys, tmp_path, name, says):
    found, _ = examined(name, capsys, tmp_path)
    assert says in found["why"]


def examined(name, capsys, tmp_path):
    """Return what `doctor` finds of a model, and its exit status."""
    file = tmp_path / "node.yaml"
    file.write_text(f"listen: {tmp_path}/node.sock\ntiers: [{{kind: host, capacity: 16 MiB}}]\n")
    status = main(["doctor", "--config", str(file), "--model", name, "--json", "-"])
    checks = {check["what"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    return checks["model"], status
