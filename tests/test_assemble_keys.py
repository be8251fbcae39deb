"""Keys of domains: from files, descriptors and commands; what is wrong is said with its remedy."""

import os
import sys

import pytest

from holdfast.assemble import open_store
from holdfast.assemble.domains import sealed_domains
from holdfast.assemble.keys import was_handed_over
from holdfast.config import parse
from holdfast.errors import ConfigError
from holdfast.testing.payloads import key_of as key_of_block
from holdfast_bench.campaigns.contexts import Contexts

KEY = bytes(range(32))


def config(tmp_path, domains, tiers=(), **more):
    host = {"kind": "host", "capacity": "16 MiB"}
    disk = {"kind": "disk", "path": str(tmp_path / "disk"), "capacity": "16 MiB"}
    data = {"listen": "unix:///tmp/x.sock", "tiers": [host, *(tiers or [disk])]}
    return parse({**data, "domains": domains, **more}, tmp_path)


def key_of(tmp_path, source):
    with open_store(config(tmp_path, {"acme": source})) as store:
        return store.domain("acme")[0]


def on_a_pipe(data):
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    return read


@pytest.mark.parametrize("form", [KEY, KEY.hex().encode(), KEY.hex().encode() + b"\n"])
def test_a_key_comes_from_a_descriptor_which_is_closed(tmp_path, form):
    fd = on_a_pipe(form)
    assert key_of(tmp_path, {"key_fd": fd}) == KEY
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(
    ("data", "words"), [(b"short", "gave 5 bytes; it must give 32"), (b"", "gave 0 bytes")]
)
def test_a_descriptor_without_a_key_is_refused(tmp_path, data, words):
    fd = on_a_pipe(data)
    with pytest.raises(ConfigError, match=rf"^domains\.acme\.key_fd: descriptor {fd} {words}"):
        key_of(tmp_path, {"key_fd": fd})


def test_a_key_descriptor_is_read_before_the_store_opens_files(tmp_path):
    fd = os.dup(2)
    os.close(fd)  # the next that is opened gets it
    with pytest.raises(ConfigError, match=rf"key_fd: descriptor {fd} cannot be read: Bad file"):
        key_of(tmp_path, {"key_fd": fd})
    assert not (tmp_path / "disk").exists()


def test_only_an_inherited_descriptor_counts_as_handed_over():
    read, write = os.pipe()
    with os.fdopen(read, "rb"), os.fdopen(write, "wb"):
        assert not was_handed_over(read)
        os.set_inheritable(read, True)  # as what comes through exec is
        assert was_handed_over(read)
    assert not was_handed_over(read)
    assert not was_handed_over(1 << 40)


@pytest.mark.parametrize("fd", [2, 1 << 40])
def test_a_number_that_cannot_be_a_key_descriptor_is_refused(tmp_path, fd):
    with pytest.raises(ConfigError, match=rf"key_fd: {fd} cannot be a key's descriptor; use 3"):
        config(tmp_path, {"acme": {"key_fd": fd}})


def test_a_descriptor_that_is_not_open_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"key_fd: descriptor 999 .* holdfast serve 999< FILE"):
        key_of(tmp_path, {"key_fd": 999})


def command(code):
    return {"key_command": [sys.executable, "-c", code], "key_timeout_s": 60}


@pytest.mark.parametrize("code", [
    f"import sys; sys.stdout.buffer.write({KEY!r})", f"print('{KEY.hex()}')",
])  # fmt: skip
def test_a_key_comes_from_a_command(tmp_path, code):
    assert key_of(tmp_path, command(code)) == KEY


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (command("print('no')"), "printed 3 bytes; it must print 32 bytes or 64 hex digits"),
        (command("import sys; sys.exit('vault is sealed')"), "ended with 1: vault is sealed; run"),
        (command("raise SystemExit(7)"), "ended with 7: no error output"),
        ({"key_command": ["/none/such"]}, "'/none/such' cannot be run: No such file"),
        (
            {"key_command": ["sleep", "30"], "key_timeout_s": 0.1},
            "'sleep' printed no key within 0.1 s; see why, or raise key_timeout_s",
        ),
    ],
)
def test_a_command_that_gives_no_key_is_refused(tmp_path, source, words):
    with pytest.raises(ConfigError, match=rf"^domains\.acme\.key_command: .*{words}"):
        key_of(tmp_path, source)
    assert not (tmp_path / "disk" / "keyring.json").exists()


def write_key(tmp_path, name="acme", key=KEY):
    file = tmp_path / f"{name}.key"
    file.write_bytes(key)
    file.chmod(0o600)
    return {"key_file": str(file)}


def test_two_domains_with_one_key_are_refused(tmp_path):
    domains = {"acme": write_key(tmp_path), "globex": write_key(tmp_path, "globex")}
    with pytest.raises(ConfigError, match=r"domains\.globex: has the key of domains\.acme"):
        open_store(config(tmp_path, domains))


def seals(store):
    return {entry["domain"]: entry["sealed"] for entry in store.domains()["domains"]}


def test_configured_domains_are_sealed_and_the_default_domain_is_not(tmp_path):
    domains = {"acme": write_key(tmp_path), "plain": {**write_key(tmp_path, "p", b"p" * 32)}}
    domains["plain"]["seal"] = False
    with open_store(config(tmp_path, domains)) as store:
        assert seals(store) == {"acme": True, "plain": False, "default": False}
        assert store.domains()["keyring"] == str(tmp_path / "disk" / "keyring.json")
    assert '"action":"key"' in (tmp_path / "disk" / "audit.jsonl").read_text()


def test_a_store_with_a_sealed_domain_does_not_open_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    domains = {"acme": write_key(tmp_path)}
    refusal = r"domains\.acme: has a key.*holdfast-kv\[secure\].*domains\.acme\.seal: false"
    for wanted in (None, True):
        domains["acme"]["seal"] = wanted
        with pytest.raises(ConfigError, match=refusal):
            open_store(config(tmp_path, domains))
    domains["acme"]["seal"] = False
    with open_store(config(tmp_path, domains)) as store:
        assert not seals(store)["acme"]


def test_a_damaged_ring_stops_the_start_and_is_left(tmp_path):
    domains = {"acme": write_key(tmp_path)}
    open_store(config(tmp_path, domains)).close()
    ring = tmp_path / "disk" / "keyring.json"
    ring.write_text("garbage")
    with pytest.raises(Exception, match=r"keyring: .*damaged or not a key ring"):
        open_store(config(tmp_path, domains))
    assert ring.read_text() == "garbage"
    ring.unlink()
    open_store(config(tmp_path, domains)).close()  # nothing was left open


def test_a_replaced_key_is_refused(tmp_path):
    open_store(config(tmp_path, {"acme": write_key(tmp_path)})).close()
    with pytest.raises(ConfigError, match=r"domains\.acme: .*under another key"):
        open_store(config(tmp_path, {"acme": write_key(tmp_path, key=b"n" * 32)}))


def test_a_target_with_a_sealed_domain_does_not_start_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.assemble.domains.missing", lambda: "install holdfast-kv[secure]")
    acme = write_key(tmp_path)
    tiers = [{"kind": "host", "capacity": "16 MiB"}]
    data = {"listen": "unix:///tmp/x.sock", "tiers": tiers, "domains": {"acme": acme}}
    assert sealed_domains(parse(data)) == []  # nobody gets it but engines of this machine
    data["listen"] = ["unix:///tmp/x.sock", "tcp://127.0.0.1:0"]
    with pytest.raises(ConfigError, match=r"domains\.acme: .* another node; install holdfast-kv\["):
        sealed_domains(parse(data))
    acme["seal"] = False
    assert sealed_domains(parse(data)) == []


def public_domain(tmp_path, publish="publish"):
    write_key(tmp_path, "publish", b"p" * 32)
    public = {**write_key(tmp_path, "shared", b"s" * 32), "public": True}
    return {
        "acme": write_key(tmp_path),
        "shared": public | {"publish_file": str(tmp_path / f"{publish}.key")},
    }


@pytest.mark.parametrize(
    ("publish", "words"),
    [
        ("shared", r"has the key of domains\.shared, which all engines have, so they could publi"),
        ("acme", r"has the key of domains\.acme, which the engines of that domain have, so they"),
        ("disk/default", r"has the key of domains\.default, which the engines of that domain have"),
    ],
)
def test_a_key_that_engines_have_does_not_permit_to_publish(tmp_path, publish, words):
    open_store(config(tmp_path, {"acme": write_key(tmp_path)})).close()  # makes the default key
    wrong = config(tmp_path, public_domain(tmp_path, publish))
    file = tmp_path / f"{publish}.key"
    refusal = rf"^domains\.shared\.publish_file: '{file}' {words}.*; give it a secret of its own$"
    with pytest.raises(ConfigError, match=refusal):
        open_store(wrong)
    open_store(config(tmp_path, public_domain(tmp_path))).close()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_ring_open_to_other_users_is_refused_with_a_public_domain(tmp_path, mode):
    ring = tmp_path / "ring.json"
    both = config(tmp_path, public_domain(tmp_path), keyring=str(ring))
    open_store(both).close()
    ring.chmod(mode)
    refusal = rf"^keyring: '{ring}' is open to other users; chmod 600 it$"
    with pytest.raises(ConfigError, match=refusal):
        open_store(both)
    ring.chmod(0o600)
    open_store(both).close()
    ring.chmod(mode)  # nothing but the engines of `acme` can unwrap its keys
    open_store(config(tmp_path, {"acme": write_key(tmp_path)}, keyring=str(ring))).close()


def test_a_renamed_domain_finds_its_sealed_blocks_under_the_new_name(tmp_path):
    keys = [key_of_block(number) for number in range(12)]
    key = write_key(tmp_path)
    with open_store(config(tmp_path, {"acme": key})) as store:
        assert Contexts(store, 20_000, "acme").save(keys) == 12
        old = store.domains()["domains"]
    with open_store(config(tmp_path, {"acme-eu": key})) as store:
        renamed = Contexts(store, 20_000, "acme-eu")
        renamed.await_recovery()
        assert renamed.read(keys) == 12
        assert store.domains()["domains"] != old
        with pytest.raises(ConfigError, match="'acme' is not configured; known: acme-eu"):
            store.domain("acme")
    with open_store(config(tmp_path, {"acme": key})) as store:  # and back
        again = Contexts(store, 20_000, "acme")
        again.await_recovery()
        assert again.read(keys) == 12


def test_data_keys_on_a_pool_are_derived_without_a_common_key_ring(tmp_path):
    (tmp_path / "members.yaml").write_text("members: []\n")
    pool = {"kind": "pool", "members": str(tmp_path / "members.yaml")}
    domains = {"default": write_key(tmp_path)}
    with open_store(config(tmp_path, domains, [pool])) as store:
        assert store.options.ring.derives
        with pytest.raises(Exception, match=r"would not remember .*; set keyring"):
            store.erase("default")
    ring = str(tmp_path / "ring.json")
    with open_store(config(tmp_path, domains, [pool], keyring=ring)) as store:
        assert not store.options.ring.derives
        assert store.erase("default")["everywhere"]
