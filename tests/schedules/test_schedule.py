"""The table itself: laying out, checking, timing and storing schedules written by hand."""

import json

import pytest

from meshpar.schedules import (
    Action,
    Costs,
    Schedule,
    ScheduleError,
    generate,
    loop_stages,
    simulate,
    validate,
    zigzag_stages,
)


def F(m, chunk=0):
    return Action("F", chunk, m)


def B(m, chunk=0):
    return Action("B", chunk, m)


def I(m, chunk=0):  # noqa: E743 - the letter of the literature
    return Action("I", chunk, m)


def W(m, chunk=0):
    return Action("W", chunk, m)


GPIPE_2 = [[F(0), F(1), B(0), B(1)]] * 2


def test_orders_are_laid_out_as_early_as_their_inputs_allow():
    schedule = Schedule.from_orders(GPIPE_2, M=2)
    drawn = [" ".join("".join(map(str, cell)) or "." for cell in row) for row in schedule.table]
    assert drawn == ["F0.0 F0.1 . . B0.0 B0.1", ". F0.0 F0.1 B0.0 B0.1 ."]
    validate(schedule)


def test_both_clocks_by_hand():
    # Two ranks, one microbatch: F on 0, F on 1, B on 1, B on 0, one after the other.
    schedule = Schedule.from_orders([[F(0), B(0)]] * 2, M=1)
    result = simulate(schedule, Costs(F=1, B=2, hop=0.5))
    assert result.makespan == 1 + 0.5 + 1 + 2 + 0.5 + 2
    assert result.lockstep_makespan == (1 + 0.5) + 1 + (2 + 0.5) + 2
    assert result.busy == (3, 3)
    assert result.bubble == pytest.approx(1 - 6 / (2 * 7))
    # The second rank works from 1.5 to 4.5, the first from 0 to 7.
    assert result.bubble_span == pytest.approx(1 - 3 / 7)
    assert result.messages == (((0, 1), 1), ((1, 0), 1))
    assert result.starts == ((0, 5), (1.5, 2.5))


def test_lockstep_equals_the_asynchronous_clock_when_all_actions_take_a_tick():
    costs = Costs(F=1, I=1, W=1, B=1)
    for name, V in [("1F1B", 1), ("ZBH1", 1), ("VPP", 2), ("InterleavedZB", 3), ("ZBVPP", 2)]:
        result = simulate(generate(name, 4, 8, V), costs)
        assert result.lockstep_makespan == result.makespan
        assert result.lockstep_bubble == result.bubble


def test_lockstep_waits_for_the_longest_action():
    result = simulate(generate("ZBH1", 4, 32), Costs(F=1, I=1.33, W=0.67))
    assert result.lockstep_makespan > 1.1 * result.makespan


def test_a_combined_cell_delivers_at_its_end():
    orders = [[F(0), F(1), (B(0), F(2)), B(1), B(2)], [F(0), B(0), F(1), B(1), F(2), B(2)]]
    result = simulate(Schedule.from_orders(orders, M=3))
    serial = simulate(Schedule.from_orders(orders, M=3).uncombined())
    # Rank 0 waits until 4 for B0; serial F2 is there at 7, combined too, as its second part.
    assert result.starts[0][2] == 4
    assert result.ends[0][2] == 7 == serial.ends[0][3]
    assert result.peak_until_W[0] == 3
    assert serial.peak_until_W[0] == 2


def test_costs_count_as_decimals():
    # 0.1 + 0.2 is not 0.3 in binary.
    schedule = Schedule.from_orders([[F(0), I(0), W(0)]], M=1)
    assert simulate(schedule, Costs(F=0.1, I=0.2, W=0.3)).makespan == 0.6


def test_split_backward_is_another_table_with_the_same_work():
    full = generate("1F1B", 4, 8)
    split = generate("1F1B", 4, 8, split_backward=True)
    validate(split)
    assert split == full.split_backward() != full
    assert {a.op for row in split.orders for cell in row for a in cell} == {"F", "I", "W"}
    # The gradient leaves after I already, so the backward wave is faster.
    assert simulate(split).makespan < simulate(full).makespan
    combined = generate("DualPipeV", 2, 8, 2, split_backward=True)
    assert any([a.op for a in cell] == ["F", "I", "W"] for row in combined.orders for cell in row)


@pytest.mark.parametrize("name, V", [("1F1B", 1), ("ZBVPP", 3), ("DualPipeV", 2)])
def test_json_and_repr_come_back_equal(name, V):
    schedule = generate(name, 3, 7, V)
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert eval(repr(schedule)) == schedule


@pytest.mark.parametrize("text", ["{}", "[]", '{"name": 1, "M": 2, "stages": 3, "table": 4}'])
def test_json_of_something_else_is_refused(text):
    with pytest.raises(ValueError, match=r"from_json: not a schedule .* name, M, stages"):
        Schedule.from_json(text)


def test_no_json_is_refused():
    with pytest.raises(json.JSONDecodeError):
        Schedule.from_json("1F1B")


@pytest.mark.parametrize(
    "orders, M, law",
    [
        ([[F(0), B(0)], [F(0)]], 1, r"rank 1: the backward of chunk 0, microbatch 0 is 0 B, 0 I"),
        ([[F(0), F(0), B(0)]], 1, r"rank 0: F0\.0 occurs 2 times, not once"),
        ([[F(0), B(0), I(0), W(0)]], 1, r"is 1 B, 1 I and 1 W; it is one B, or one I and one W"),
        ([[B(0), F(0)]], 1, r"rank 0: B0\.0 comes before F0\.0"),
        ([[F(0), W(0), I(0)]], 1, r"rank 0: W0\.0 comes before I0\.0"),
        ([[F(1), B(1)]], 1, r"F0\.1 is outside the configuration: ops F, B, I, W, 1 chunks, 1 mic"),
        ([[F(0, chunk=1), B(0, chunk=1)]], 1, r"F1\.0 is outside the configuration"),
        ([[Action("G", 0, 0)]], 1, r"G0\.0 is outside"),  # pyright: ignore[reportArgumentType]
        (
            [[F(0), B(0), F(1), B(1)], [F(1), F(0), B(0), B(1)]],
            2,
            r"deadlock: rank 0 waits at B0\.0\n  deadlock: rank 1 waits at F0\.1",
        ),
    ],
)
def test_broken_laws_are_named(orders, M, law):
    with pytest.raises(ScheduleError, match=law):
        Schedule.from_orders(orders, M=M)


def test_a_stage_on_two_ranks_is_named():
    with pytest.raises(ScheduleError, match="stage 0 lives on 2 ranks; every stage has one"):
        Schedule.from_orders(GPIPE_2, M=2, stages=((0,), (0,)))


def test_the_error_lists_all_problems():
    with pytest.raises(ScheduleError, match=r"and 12 more") as caught:
        validate(Schedule("empty", 10, ((0,),), (((),),)))
    assert len(caught.value.problems) == 20


def test_a_use_in_the_tick_of_the_making_is_no_lockstep_table():
    table = (((F(0),), (B(0),)), ((F(0),), (B(0),)))
    schedule = Schedule("dense", 1, loop_stages(2, 1), table)
    with pytest.raises(ScheduleError, match=r"tick 0: rank 1 uses F of stage 0, microbatch 0"):
        validate(schedule)


def test_shapes_are_checked_when_a_table_is_made():
    with pytest.raises(ValueError, match=r"rows of \[2, 1\] ticks for 2 ranks"):
        Schedule("ragged", 1, loop_stages(2, 1), (((F(0),), (B(0),)), ((F(0),),)))
    with pytest.raises(ValueError, match="a row of stages for each rank"):
        Schedule("ragged", 1, ((0, 1), (2,)), ((), ()))
    with pytest.raises(ValueError, match="at least one microbatch"):
        Schedule("none", 0, ((0,),), ((),))


@pytest.mark.parametrize("costs", [{"F": 0}, {"W": -1}, {"hop": -0.1}, {"I": float("inf")}])
def test_costs_are_positive(costs):
    with pytest.raises(ValueError, match="a cost is a finite number, "):
        Costs(**costs)


def test_placements():
    assert loop_stages(3, 2) == ((0, 3), (1, 4), (2, 5))
    assert zigzag_stages(3, 3) == ((0, 5, 6), (1, 4, 7), (2, 3, 8))
    assert generate("ZBVPP", 2, 2, 2).places == ((0, 0), (1, 0), (1, 1), (0, 1))
