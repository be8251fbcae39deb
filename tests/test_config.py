"""Configuration: where values come from, and what a person is told about a wrong one."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import config as configuration
from holdfast.config import Config, DiskOptions, HostOptions, Size, as_data, load, parse
from holdfast.errors import ConfigError
from holdfast.limits import GIB, MIB
from holdfast.probe import memory

HOST = {"kind": "host", "capacity": "64 MiB"}
DISK = {"kind": "disk", "path": "/data/blocks", "capacity": "1 GiB"}


def data(*tiers, **more):
    return {"listen": "unix:///run/h/node.sock", "tiers": list(tiers) or [HOST], **more}


@pytest.fixture
def written(tmp_path):
    """Write a file and return its path."""

    def write(text):
        file = tmp_path / "holdfast.yaml"
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        ("512", 512),
        ("8 GiB", 8 * GIB),
        ("8gib", 8 * GIB),
        ("1.5 MiB", 3 * MIB // 2),
        ("2 GB", 2 * 10**9),
        (" 7 b ", 7),
        ("1 TiB", 1024 * GIB),
        ("0.5 PiB", 512 * 1024 * GIB),
        ("2 PB", 2 * 10**15),
    ],
)
def test_sizes_are_bytes_or_numbers_with_a_unit(text, nbytes):
    assert Size.of(text) == nbytes


@pytest.mark.parametrize("text", ["", "8 foo", "-2", -1, "GiB", True, 1.5, None, "1e9", "0x10"])
def test_an_invalid_size_is_refused(text):
    with pytest.raises(ValueError, match="not a size; write bytes, or a number and a unit"):
        Size.of(text)


@given(st.integers(0, 1 << 50))
def test_a_printed_size_is_read_back_within_a_thousandth(nbytes):
    assert abs(Size.of(str(Size(nbytes))) - nbytes) <= nbytes / 1000


def test_flags_override_the_environment_which_overrides_the_file(written):
    file = written(
        "listen: /run/a.sock\n"
        "lease_s: 1\n"
        "write: on_eviction\n"
        "tiers: [{kind: host, capacity: 64 MiB}, {kind: disk, path: d, capacity: 1 GiB}]\n"
    )
    environment = {
        "HOLDFAST__LEASE_S": "2",
        "HOLDFAST__TIERS__1__CAPACITY": "2 GiB",
        "HOLDFAST__ENGINE__SAVE": "false",
        "HOLDFAST_KILL_CYCLES": "none of our business",
    }
    config = load(file, {"lease_s": "3"}, environment)
    assert config.lease_s == 3
    assert config.write == "on_eviction"
    assert config.engine.save is False
    assert config.tiers[1].capacity == 2 * GIB
    assert config.tiers[1].path == f"{Path(file).parent}/d"


@pytest.mark.parametrize(
    ("lock", "nbytes"), [("auto", None), ("off", 0), ("48 MiB", 48 * MIB), (4096, 4096)]
)
def test_the_memory_that_engines_may_lock_is_a_size_or_a_word(lock, nbytes):
    assert parse(data({**HOST, "lock": lock})).lock_bytes == nbytes
    assert parse(data(HOST)).lock_bytes is None


def test_default_tiers_follow_the_machine_without_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = load(environment={"XDG_RUNTIME_DIR": "/run/user/7"})
    assert config.listen == "unix:///run/user/7/holdfast/node.sock"
    host, disk = config.tiers
    assert host.capacity <= memory().nbytes // 5 + 1
    assert disk.path == f"{tmp_path}/holdfast/disk"
    assert list(tmp_path.iterdir()) == []


def test_a_private_node_listens_and_stores_in_its_folder(tmp_path, written):
    config = load(private=str(tmp_path), environment={})
    assert config.listen == f"unix://{tmp_path}/node.sock"
    assert config.tiers[1].path == f"{tmp_path}/disk"
    file = written("listen: /elsewhere\ntiers: [{kind: host, capacity: 32 MiB}]\n")
    config = load(file, private=str(tmp_path), environment={})
    assert config.listen == f"unix://{tmp_path}/node.sock"
    assert config.tiers == [HostOptions(capacity=Size(32 * MIB))]


def test_a_disk_file_that_is_there_keeps_its_size(tmp_path):
    (tmp_path / "disk").mkdir()
    with (tmp_path / "disk" / "blocks.holdfast").open("wb") as file:
        file.truncate(77 * MIB)
    assert configuration.default_tiers(str(tmp_path))[1]["capacity"] == 77 * MIB


def test_plain_data_of_a_config_is_the_same_config():
    config = parse(data(HOST, DISK, domains={"a": {"key_file": "/k"}}, write="on_eviction"))
    assert parse(configuration.as_data(config)) == config
    assert msgspec.json.decode(msgspec.json.encode(configuration.as_data(config)))["lease_s"] == 30


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        (
            data(tier=1),
            "configuration: contains unknown field 'tier'; remove it; known here: listen",
        ),
        (
            data({**HOST, "size": 1}),
            r"tiers\.0: contains unknown field 'size'; .*: kind, capacity, lock$",
        ),
        (
            data(HOST, {**DISK, "x": 1}),
            r"tiers\.1: contains .* 'x'; .*: kind, path, capacity, region",
        ),
        (
            data(engine={"sav": 1}),
            "engine: contains unknown field 'sav'; .*: deadline_s, save, model",
        ),
        (data(domains={"a": {"file": 1}}), r"domains\.a: contains unknown .*: key_file"),
        (data({"kind": "host"}), r"tiers\.0: missing required field 'capacity'; add it"),
        (
            data({"kind": "tape", "capacity": 1}),
            r"tiers\.0\.kind: 'tape': .*; use one of: host, cxl, disk",
        ),
        (
            data({**HOST, "capacity": "8 foo"}),
            r"tiers\.0\.capacity: '8 foo': not a size; write bytes",
        ),
        (data(HOST, {**DISK, "capacity": "x"}), r"tiers\.1\.capacity: 'x': not a size"),
        (data(write="later"), "write: 'later': .*; use one of: behind, on_eviction"),
        (data(policy=""), "policy: '': .*; use one of: cost_aware, leaf_lru, s3fifo, lirs"),
        (data(plan="worst"), "plan: 'worst': .*; use one of: best, held"),
        (data(transport="pigeon"), "transport: 'pigeon': .*; use one of: auto, nixl, tcp"),
        (data(HOST, DISK | {"admit": "no"}), "tiers.1.admit: 'no': .*; use one of: always, "),
        (data(lease_s="soon"), "lease_s: 'soon': Expected 'float', got 'str'"),
        (data(lease_s=0), "lease_s: 0 s is not above 0 and at most 3,600 s; raise it"),
        (data(durable_days=0), "durable_days: 0 days is not above 0 and at most 36,500 days"),
        (data(HOST, durable="disk"), "durable: .* below the host; add a disk tier, or remove dur"),
        (data(lease_s=1e9), "lease_s: 1,000,000,000 s is not .* at most 3,600 s; lower it"),
        (data(engine={"deadline_s": float("nan")}), r"engine\.deadline_s: nan s is not above 0"),
        (
            data(listen="tcp://h:1"),
            "listen: 'tcp://h:1' can be reached from other machines without authentication",
        ),
        (data(listen="http://h:1"), "listen: address 'http://h:1' is neither unix:///path nor"),
        (data(listen="tcp://h"), "listen: address 'tcp://h' is not tcp://host:port, such"),
        (data(listen=[]), "listen: 0 addresses, 0 of them Unix sockets; name at least one"),
        (data(listen=["/a", "/b"]), "listen: 2 addresses, 2 of them Unix sockets; .* one unix://"),
        (
            data(listen=["/a", "tcp://127.0.0.1:1", "tcp://[::]:1"]),
            r"listen: 'tcp://\[::\]:1' can be reached from other .* or tokens.key_file, or listen",
        ),
        (data(tls={"cert": "a", "key": "b"}), "tls: missing required field 'ca'; add it"),
        (
            data(tokens={"keyfile": "a"}),
            "tokens: .*unknown field .* known here: key_file, second_key_file, file",
        ),
        (data(listen="/" + "x" * 200), "listen: .* has 201 bytes, a Unix socket allows 107"),
        (data(DISK), "tiers: disk given; name one host tier, first"),
        (data(HOST, HOST), "tiers: host, host given"),
        (data(DISK, HOST), "tiers: disk, host given; name one host tier, first"),
        ({"listen": "/x", "tiers": []}, "tiers: nothing given"),
        (
            data({**HOST, "capacity": "900 TiB"}),
            r"tiers\.0\.capacity: 900 TiB given, .* is .*; lower",
        ),
        (
            data({**HOST, "lock": "some"}),
            r"tiers\.0\.lock: 'some' is neither auto nor off, and not a",
        ),
        (data({**HOST, "lock": -1}), r"tiers\.0\.lock: -1 is neither auto nor off"),
        (
            data({**HOST, "lock": "900 TiB"}),
            r"tiers\.0\.lock: 900 TiB given, tiers\.0\.capacity is 64 MiB; .*: lower it, or write",
        ),
        (data({**HOST, "capacity": 5}), r"tiers\.0\.capacity: 5 B is less than 16 MiB; raise it"),
        (data(HOST, {**DISK, "capacity": 5}), r"tiers\.1\.capacity: 5 B is less than 16 MiB"),
        (
            data(HOST, {**DISK, "move_limit": 0}),
            r"tiers\.1\.move_limit: 0 B is less than 1 MiB; raise",
        ),
        (data(HOST, DISK, DISK), r"tiers\.2\.path: '/data/blocks' is also the folder of tiers\.1"),
        (
            data(domains={"A/b": {"key_file": "x"}}),
            r"domains\.A/b: 'A/b' is not the name of a domain, which has 1 to 64 of",
        ),
    ],
)
def test_an_error_names_path_value_limit_and_remedy(given_, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        parse(given_)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "HOLDFAST__TIERS__7__CAPACITY",
            "HOLDFAST__TIERS__7__CAPACITY: '7' does not exist in a list of 1",
        ),
        ("HOLDFAST__TIERS__X", "HOLDFAST__TIERS__X: 'x' does not exist in"),
        ("HOLDFAST__LISTEN__X", "HOLDFAST__LISTEN__X: 'x' does not exist in '/run/a.sock'"),
        ("HOLDFAST__LEAS_S", "configuration: contains unknown field 'leas_s'"),
    ],
)
def test_an_environment_variable_that_fits_no_option_is_refused_by_name(written, name, words):
    file = written("listen: /run/a.sock\ntiers: [{kind: host, capacity: 64 MiB}]\n")
    with pytest.raises(ConfigError, match=f"^{words}"):
        load(file, environment={name: "1"})


def test_the_environment_can_add_a_tier(written):
    file = written("listen: /run/a.sock\ntiers: [{kind: host, capacity: 64 MiB}]\n")
    names = {"KIND": "disk", "PATH": "/d", "CAPACITY": "1 GiB"}
    environment = {f"HOLDFAST__TIERS__1__{name}": value for name, value in names.items()}
    assert load(file, environment=environment).tiers[1] == DiskOptions(
        path="/d", capacity=Size(GIB)
    )


@pytest.mark.parametrize(
    "text", ["- a\n- b\n", "just words", "a: [", "!!python/object:os.system {}", ""]
)
def test_a_file_that_is_no_mapping_is_refused_by_name(written, text):
    file = written(text)
    with pytest.raises(ConfigError, match=r"holdfast\.yaml: (holds|cannot be read as YAML)"):
        load(file, environment={})


def test_a_file_that_is_missing_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load(str(tmp_path / "none.yaml"), environment={})


words = st.text("abc._-0/ ", max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(words | st.sampled_from(Config.__struct_fields__), inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    "section", ["engine", "scrub", "tls", "tokens", "register", "http", "domains.d"]
)
def test_an_unknown_key_of_any_section_is_refused_with_the_known_ones(section):
    data = {"listen": "unix:///tmp/node", "tiers": [{"kind": "host", "capacity": "1 MiB"}]}
    here = data
    for name in section.split("."):
        here = here.setdefault(name, {})
    here["unheard"] = 1
    with pytest.raises(ConfigError, match=r"unheard.*known here: "):
        parse(data)


@given(st.dictionaries(words | st.sampled_from(Config.__struct_fields__), plain, max_size=5))
def test_arbitrary_configurations_are_read_or_refused_without_a_crash(made_up):
    try:
        config = parse(made_up)
    except ConfigError as error:
        assert str(error)  # noqa: PT017  # either end is fine, a crash is not
    else:
        assert isinstance(config, Config)


POOL = {"kind": "pool", "members": "members.yaml"}


def test_a_pool_needs_a_key_that_all_nodes_share(tmp_path):
    with pytest.raises(ConfigError, match=r"tiers\.1: .* set domains\.default\.key_file"):
        parse(data(HOST, POOL), tmp_path)


def test_a_pools_member_file_is_relative_to_the_configurations_folder(tmp_path):
    keyed = data(HOST, POOL, domains={"default": {"key_file": "key"}})
    assert parse(keyed, tmp_path).tiers[1].members == str(tmp_path / "members.yaml")
    keyed["tiers"][1] = {**POOL, "members": "dns://targets:7000"}
    assert parse(keyed, tmp_path).tiers[1].members == "dns://targets:7000"


def test_unknown_keys_of_a_pool_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="known here: kind, members, deadline_s"):
        parse(data(HOST, {**POOL, "path": "/x"}))


VALKEY = {"kind": "valkey", "address": "tcp://10.0.0.7:6379"}
KEYED = {"default": {"key_file": "key"}}


def test_files_of_a_valkey_tier_are_relative_to_the_configurations_folder(tmp_path):
    files = {"user": "hf", "password_file": "secret", "tls_ca": "/etc/ca.pem", "tls_cert": "c.pem"}
    config = parse(data(HOST, {**VALKEY, **files}, domains=KEYED), tmp_path)
    assert config.tiers[1].password_file == f"{tmp_path}/secret"
    assert (config.tiers[1].tls_ca, config.tiers[1].tls_key) == ("/etc/ca.pem", "")
    assert parse(as_data(config)) == config


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"address": "10.0.0.7:6379"}, r"tiers\.1\.address: .* is not tcp://host:port"),
        ({"address": ["tcp://a:1", "tcp://b:1"]}, r"tiers\.1\.address: 2 .* set cluster: true"),
        ({"address": [], "cluster": True}, r"tiers\.1\.address: 0 addresses given"),
        (
            {"cluster": True, "database": 2},
            r"tiers\.1\.database: 2 is below 0, or given for a cluster",
        ),
        ({"ttl_s": -1}, r"tiers\.1\.ttl_s: -1 s is not from 0 to 315360000 s .* 0 leaves it"),
        ({"ttl_s": 315_360_001.0}, r"tiers\.1\.ttl_s: .* is not from 0 to 315360000 s"),
        ({"ttl_s": float("inf")}, r"tiers\.1\.ttl_s: inf s is not from 0"),
        ({"ttl_s": float("nan")}, r"tiers\.1\.ttl_s: nan s is not from 0"),
        ({"deadline_s": 0}, r"tiers\.1\.deadline_s: 0 s is not above 0"),
        ({"ask_s": 61}, r"tiers\.1\.ask_s: 61 s is not .* at most 60 s"),
        ({"prefix": "a{b}"}, r"tiers\.1\.prefix: 'a\{b\}' is not a key prefix; use"),
        ({"user": "hf"}, r"tiers\.1\.user: given without password_file; add it"),
        ({"tls_cert": "c"}, r"tiers\.1\.tls_cert: given without tls_ca; add it"),
        ({"password": "x"}, r"tiers\.1: .*unknown field 'password'; remove it; known here: kind,"),
    ],
)
def test_invalid_valkey_options_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        parse(data(HOST, {**VALKEY, **given}, domains=KEYED))


def test_a_valkey_tier_needs_a_key_that_all_nodes_share():
    with pytest.raises(ConfigError, match=r"tiers\.1: .* set domains\.default\.key_file"):
        parse(data(HOST, VALKEY))


MOONCAKE = {"kind": "mooncake", "master": "tcp://10.0.0.7:50051"}


def test_a_mooncake_tier_is_read(tmp_path):
    [_, tier] = parse(data(HOST, {**MOONCAKE, "lane": "256 MiB"}, domains=KEYED), tmp_path).tiers
    assert (tier.lane, tier.protocol, tier.prefix) == (256 * MIB, "tcp", "holdfast")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"master": "10.0.0.7"}, r"tiers\.1\.master: .* is not tcp://host:port"),
        ({"lane": "4 KiB"}, r"tiers\.1\.lane: 4 KiB is less than 1 MiB; raise it"),
        (
            {"protocol": "quic"},
            r"tiers\.1\.protocol: .*Invalid enum value 'quic'; use one of: tcp, rdma",
        ),
        ({"prefix": ""}, r"tiers\.1\.prefix: '' is not a key prefix; use"),
        ({"deadline_s": 99}, r"tiers\.1\.deadline_s: 99 s is not .* at most 60 s"),
    ],
)
def test_invalid_mooncake_options_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        parse(data(HOST, {**MOONCAKE, **given}, domains=KEYED))


TARGET = {"listen": "tcp://127.0.0.1:7441"}


def registered(**register):
    return data() | TARGET | {"register": {"members": "etcd://a:2379/pool", **register}}


def test_a_registration_has_the_given_options_and_defaults():
    register = parse(registered(weight=4, zone="z1")).register
    assert (register.members, register.weight, register.zone) == ("etcd://a:2379/pool", 4.0, "z1")
    assert (register.id, register.address, register.drain_s) == ("", "", 5.0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            registered(members="pool.yaml"),
            r"register\.members: 'pool\.yaml' does not take reg",
        ),
        (
            registered(members="etcd://"),
            r"register\.members: 'etcd://' does not take .* etcd://HOST",
        ),
        (registered(id="flash 1"), r"register\.id: 'flash 1' is not"),
        (registered(address="10.0.0.1"), r"register\.address: '10\.0\.0\.1' is not an address"),
        (registered(weight=0), r"register\.weight: 0\.0 is not above 0"),
        (registered(zone="a/b"), r"register\.zone: 'a/b' is not"),
        (
            registered(drain_s=0),
            r"register\.drain_s: 0 s is not .* at most 3,600 s; raise it",
        ),
        (registered(name="x"), r"register: .*unknown field 'name'; .*: members, id, address,"),
        (
            {**registered(), "listen": "tcp://0.0.0.0:7441", "tokens": {"key_file": "k"}},
            r"register\.address: other hosts cannot connect to tcp://0\.0\.0\.0:7441; listen on",
        ),
        (
            {**registered(address="tcp://a:1"), "listen": "unix:///run/h/node.sock"},
            r"register\.address: other hosts cannot connect to unix:",
        ),
    ],
)
def test_an_unusable_registration_is_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        parse(wrong)


def test_a_target_may_listen_everywhere_if_it_registers_an_address():
    config = registered(address="tcp://flash-1:7441")
    config |= {"listen": "tcp://0.0.0.0:7441", "tokens": {"key_file": "k"}}
    assert parse(config).register.address == "tcp://flash-1:7441"


@pytest.mark.parametrize("ask_s", [0, -1, 61])
def test_the_time_limit_of_a_pool_lookup_has_bounds(ask_s):
    pool = {"kind": "pool", "members": "m.yaml", "ask_s": ask_s}
    with pytest.raises(ConfigError, match=r"tiers\.1\.ask_s: .* above 0 and at most 60 s"):
        parse(data(HOST, pool, domains={"default": {"key_file": "k"}}))


@pytest.mark.parametrize("ramp_s", [0, -1, 86_401])
def test_the_ramp_of_a_pool_has_bounds(ramp_s):
    pool = {"kind": "pool", "members": "m.yaml", "ramp_s": ramp_s}
    with pytest.raises(ConfigError, match=r"tiers\.1\.ramp_s: .* above 0 and at most 86,400 s"):
        parse(data(HOST, pool, domains={"default": {"key_file": "k"}}))


def test_paths_are_relative_to_the_folder_of_the_file(written, tmp_path):
    file = written(
        "listen: [unix:///run/h/node.sock, tcp://0.0.0.0:7440]\n"
        "tiers: [{kind: host, capacity: 64 MiB}, {kind: disk, path: blocks, capacity: 1 GiB}]\n"
        "domains: {default: {key_file: name}}\n"
        "keyring: name\naudit: name\nrecord: name\n"
        "tls: {cert: name, key: name, ca: name}\n"
        "tokens: {key_file: name}\n"
        "http: {listen: tcp://127.0.0.1:7442, token_file: name}\n"
    )
    config = load(file)
    assert config.tls is not None
    assert config.tiers[1].path == f"{tmp_path}/blocks"
    assert {
        config.domains["default"].key_file, config.keyring, config.audit, config.record,
        config.tls.cert, config.tls.key, config.tls.ca, config.tokens.key_file,
        config.http.token_file,
    } == {f"{tmp_path}/name"}  # fmt: skip


@pytest.mark.parametrize("mode", ["auto", "off", "planes"])
@pytest.mark.parametrize(
    "tier",
    [
        DISK,
        {"kind": "pool", "members": "pool.yaml"},
        {"kind": "valkey", "address": "tcp://127.0.0.1:6379"},
        {"kind": "mooncake", "master": "tcp://127.0.0.1:50051"},
    ],
    ids=lambda tier: tier["kind"],
)
def test_each_tier_that_stores_records_has_a_codec_option(tier, mode):
    domains = {"default": {"key_file": "/etc/holdfast/key"}}
    assert parse(data(HOST, {**tier, "codec": mode}, domains=domains)).tiers[1].codec == mode
    assert parse(data(HOST, tier, domains=domains)).tiers[1].codec == "auto"


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ([HOST, {**DISK, "codec": "zip"}], r"tiers\.1\.codec: .*'zip'.*auto.*off.*planes"),
        ([{**HOST, "codec": "planes"}], r"tiers\.0: contains unknown field 'codec'; remove it"),
        (
            [HOST, {"kind": "cxl", "node": "any", "capacity": "64 MiB", "codec": "planes"}],
            r"tiers\.1: contains unknown field 'codec'; remove it",
        ),
    ],
)
def test_a_codec_that_is_unknown_or_of_memory_is_refused(tiers, message):
    with pytest.raises(ConfigError, match=message):
        parse(data(*tiers))
