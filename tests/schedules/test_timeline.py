"""The drawings of a schedule."""

import xml.etree.ElementTree as ElementTree

import pytest

from meshpar.schedules import Costs, generate, simulate
from meshpar.schedules.timeline import axis_times

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    "case", [("1F1B", 4, 8, 1), ("ZBVPP", 3, 6, 2), ("DualPipeV", 3, 8, 2)], ids=str
)
def test_the_svg_has_a_bar_for_every_action_in_its_place(case):
    schedule = generate(*case)
    root = ElementTree.fromstring(schedule.plot().svg)
    bars = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    actions = [a for row in schedule.orders for cell in row for a in cell]
    hints = sorted(bar.find(f"{SVG}title").text.split(",")[0] for bar in bars)
    assert hints == sorted(f"{a.op} chunk {a.chunk} microbatch {a.microbatch}" for a in actions)
    width, height = float(root.get("width")), float(root.get("height"))
    for bar in bars:
        assert float(bar.get("x")) + float(bar.get("width")) <= width
        assert float(bar.get("y")) + float(bar.get("height")) <= height
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0].startswith(schedule.title)
    assert {f"rank {rank}" for rank in range(schedule.P)} <= set(texts)


def test_the_title_has_bubble_and_peak():
    costs = Costs(hop=0.5)
    timeline = generate("ZBH1", 4, 8).plot(costs)
    result = simulate(generate("ZBH1", 4, 8), costs)
    assert timeline.title == (
        f"ZBH1 (P=4, M=8, V=1): bubble {result.bubble:.1%}, peak 4 stage activations"
    )
    assert timeline.makespan == result.makespan


def test_a_schedule_shows_itself_in_jupyter():
    schedule = generate("1F1B", 2, 3)
    assert schedule._repr_html_() == schedule.plot()._repr_html_() == schedule.plot().svg


def test_files(tmp_path):
    timeline = generate("1F1B", 2, 3).plot()
    for name in ("a.svg", "a.html"):
        timeline.save(tmp_path / name)
        assert (tmp_path / name).read_text() == timeline.svg
    with pytest.raises(ValueError, match=r"ends in \.svg, \.html or \.png"):
        timeline.save(tmp_path / "a.gif")


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    generate("DualPipeV", 2, 4, 2).plot().save(str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("makespan", [0.3, 1, 7.5, 33, 1024.5])
def test_axis_times_are_few_and_inside(makespan):
    times = axis_times(makespan)
    assert times[0] == 0
    assert times[-1] <= makespan
    assert 2 <= len(times) <= 13
