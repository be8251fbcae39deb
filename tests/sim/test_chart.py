"""Charts are well-formed, stand alone, and show their points where the axes say."""

import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sim.chart import HEIGHT, WIDTH, Axis, Series, chart

SVG = "{http://www.w3.org/2000/svg}"
VALUES = st.floats(1e-6, 1e12)


def dots(text):
    circles = ET.fromstring(text).iter(f"{SVG}circle")
    return [(float(c.get("cx")), float(c.get("cy"))) for c in circles]


@given(st.lists(st.tuples(VALUES, VALUES), max_size=20), st.booleans(), st.booleans())
def test_every_point_lies_inside_the_picture(points, log_x, log_y):
    series = [Series("a", sorted(points), "steps"), Series("b", points, "points")]
    text = chart("t", Axis("x", log_x), Axis("y", log_y), series)
    places = dots(text)
    assert len(places) == 2 * len(points)
    assert all(0 <= a <= WIDTH and 0 <= b <= HEIGHT for a, b in places)


@pytest.mark.parametrize("log", [False, True])
def test_points_lie_where_the_ticks_say(log):
    points = [(1.0, 10.0), (10.0, 100.0), (100.0, 1000.0)]
    text = chart("t", Axis("x", log), Axis("y", log), [Series("a", points, "points")])
    for (a, b), (x, y) in zip(dots(text), points, strict=True):
        across = re.search(rf'x="([\d.]+)" y="[\d.]+" text-anchor="middle">{x:,.0f}<', text)
        up = re.search(rf'y="([\d.]+)" text-anchor="end">{y:,.0f}<', text)
        if log or x == points[-1][0]:
            assert float(across[1]) == pytest.approx(a, abs=0.2)
            assert float(up[1]) - 4 == pytest.approx(b, abs=0.2)


def test_points_at_zero_are_left_out_of_a_logarithmic_chart():
    text = chart("t", Axis("x", log=True), Axis("y"), [Series("a", [(0, 1), (1, 1)], "points")])
    assert len(dots(text)) == 1
    assert "<svg" in chart("nothing", Axis("x"), Axis("y"), [Series("a", [])])


def test_a_chart_is_a_self_contained_svg():
    series = [Series("a <b> & c", [(1, 1), (1.01, 3), (2, 2)], "line", ["x < y", "near"])]
    text = chart("<t>", Axis("&"), Axis('"'), series)
    assert ET.fromstring(text).tag == f"{SVG}svg"
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in text
    assert "x &lt; y" in text
    assert ">near<" not in text  # too near to the note before it
    assert "prefers-color-scheme: dark" in text
