"""Configs and profiles that are damaged at random: a ConfigError or a sane answer, nothing else."""

import copy
import json
import math
from importlib import resources

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.sim.model.catalogue import known_models, read_model
from holdfast.sim.model.fields import Fields
from holdfast.sim.profile import load_profile

JUNK = st.sampled_from(
    [
        None,
        True,
        False,
        -1,
        0,
        1,
        3.5,
        10**9,
        10**30,
        float("nan"),
        "",
        "x",
        [],
        [1],
        ["x"],
        {},
        {"a": 1},
    ]
)


def shipped_config(name):
    folder = resources.files("holdfast.sim") / "data" / "models"
    return json.loads((folder / f"{name.replace('/', '--')}.json").read_text())


def places(data, above=()):
    """The path of every value in nested mappings."""
    for key, value in data.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, (*above, key))


def damaged(draw, data):
    """A copy with some values gone and some replaced."""
    found = copy.deepcopy(data)
    for path in draw(st.lists(st.sampled_from(list(places(data))), min_size=1, max_size=3)):
        here = found
        for key in path[:-1]:
            here = here.get(key) if isinstance(here, dict) else None
        if isinstance(here, dict) and path[-1] in here:
            if draw(st.booleans()):
                del here[path[-1]]
            else:
                here[path[-1]] = draw(JUNK)
    return found


def attempted(read, *arguments):
    """What was read and nothing, or nothing and why it was refused."""
    try:
        return read(*arguments), ""
    except ConfigError as error:
        return None, str(error)


@given(st.sampled_from(known_models()), st.data())
def test_a_damaged_config_is_refused_or_understood(name, data):
    config = damaged(data.draw, shipped_config(name))
    shape, refusal = attempted(lambda: read_model(Fields(config, "damaged")))
    if shape is None:
        assert refusal.startswith("damaged: ")
        return
    for figure in (shape.kv_bytes_per_token(), shape.fixed_bytes(), shape.prefill_flop(1000, 10)):
        assert math.isfinite(figure)
        assert figure >= 0


PROFILE = yaml.safe_load((resources.files("holdfast.sim") / "data" / "profile.yaml").read_text())


@given(st.data())
@settings(max_examples=40)  # each is a file of 18 KB
def test_a_damaged_profile_is_refused_or_understood(tmp_path_factory, data):
    text = yaml.safe_dump(damaged(data.draw, PROFILE))
    file = tmp_path_factory.mktemp("junk") / "junk.yaml"
    file.write_text(text)
    profile, refusal = attempted(load_profile, str(file))
    if profile is None:
        assert refusal.startswith(f"{file}: ")
        return
    assert all(medium.read_bytes_per_s.low > 0 for medium in profile.media.values())
