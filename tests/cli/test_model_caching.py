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
    file = tmp_path / "node.yaml"
    file.write_text(f"listen: {tmp_path}/node.sock\ntiers: [{{kind: host, capacity: 16 MiB}}]\n")
    status = main(["doctor", "--config", str(file), "--model", name, "--json", "-"])
    checks = {check["what"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert (checks["model"]["ok"], says in checks["model"]["why"]) == (ok, True)
    assert status == (ok is False)
