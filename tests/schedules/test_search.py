"""`auto`: against brute force, the named schedules, and the bounds it promises."""

from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpar.schedules import (
    NAMES,
    Action,
    Costs,
    Schedule,
    auto,
    generate,
    simulate,
    validate,
    zbvpp,
)
from meshpar.schedules.bounds import least_makespan
from meshpar.schedules.greedy import ListScheduler, Problem, Rule
from meshpar.schedules.stages import loop_stages, zigzag_stages
from meshpar.schedules.validation import ScheduleError

COST_SETS = [Costs(), Costs(I=1.2, W=0.8), Costs(hop=0.1), Costs(I=1.3, W=0.5, B=1.8, hop=0.25)]
CHUNKS = {"1F1B": [1], "Eager1F1B": [1], "ZBH1": [1], "DualPipeV": [2], "ZBVPP": [2, 3]}


def every_order(M):
    """All orders of one rank with one stage, microbatches in turn."""
    work = [op for op in "FIW" for _ in range(M)]
    orders = []
    for ops in sorted(set(permutations(work))):
        done = dict.fromkeys("FIW", 0)
        order = []
        for op in ops:
            order.append(Action(op, 0, done[op]))
            done[op] += 1
            if not done["F"] >= done["I"] >= done["W"]:
                break
        else:
            orders.append(order)
    return orders


def every_schedule(P, M):
    for orders in product(every_order(M), repeat=P):
        try:
            yield Schedule.from_orders(orders, M)
        except ScheduleError:
            continue  # a deadlock


@pytest.mark.parametrize("P, M", [(1, 2), (2, 2), (3, 2), (2, 3)])
def test_auto_finds_the_optimum_of_all_split_schedules(P, M):
    best = {}
    for schedule in every_schedule(P, M):
        for number, costs in enumerate(COST_SETS):
            result = simulate(schedule, costs)
            for limit in range(max(result.peak_until_W), M + 1):
                key = limit, number
                best[key] = min(result.bubble, best.get(key, 1))
    assert sorted({limit for limit, _ in best}) == list(range(1, M + 1))
    for (limit, number), bubble in best.items():
        found = auto(P, M, memory_limit=limit, costs=COST_SETS[number])
        assert simulate(found, COST_SETS[number]).bubble <= bubble + 1e-12


def problems():
    return st.tuples(
        st.integers(1, 6), st.integers(1, 10), st.integers(1, 3), st.sampled_from(COST_SETS)
    ).flatmap(lambda p: st.tuples(st.just(p), st.integers(p[2], p[1] * p[2])))


@settings(deadline=None, max_examples=12, print_blob=True)
@given(problems())
def test_auto_is_valid_within_the_limit_and_as_good_as_every_named_schedule(case):
    (P, M, V, costs), limit = case
    found = auto(P, M, V, memory_limit=limit, costs=costs)
    validate(found)
    result = simulate(found, costs)
    assert max(result.peak_until_W) <= limit
    for name in NAMES:
        if V in CHUNKS.get(name, [1, 2, 3]):
            other = simulate(generate(name, P, M, V), costs)
            if max(other.peak_until_W) <= limit:
                assert result.bubble <= other.bubble, name


@pytest.mark.parametrize("P, M, V", [(4, 6, 1), (3, 5, 2)])
def test_the_same_call_gives_the_same_schedule(P, M, V):
    costs = Costs(I=1.2, W=0.8, hop=0.1)
    assert auto(P, M, V, V * P, costs) == auto(P, M, V, V * P, costs)


@pytest.mark.parametrize("V", [1, 2, 3])
def test_below_the_least_limit_the_error_names_it(V):
    for call, make in [("auto", auto), ("zbvpp", zbvpp)][: 2 if V > 1 else 1]:
        with pytest.raises(
            ValueError, match=rf"{call}\(memory_limit={V - 1}\): the least .* is {V}\."
        ):
            make(4, 8, V, memory_limit=V - 1)
        least = make(4, 8, V, memory_limit=V)
        validate(least)
        assert max(simulate(least).peak_until_W) == V


def test_less_memory_than_1f1b_costs_less_than_the_published_patterns():
    """V-Half and V-Min (arXiv 2405.15362) for P=8, M=32: their peaks, about P/2M and 2P/3M idle."""
    for peak, idle in [(10, 8 / 64), (8, 16 / 96)]:
        result = simulate(zbvpp(8, 32, 2, memory_limit=peak))
        assert max(result.peak_until_W) <= peak
        assert result.bubble_span < idle


def test_more_memory_hides_hops():
    costs = Costs(hop=0.2)
    tight = simulate(auto(4, 12, memory_limit=4, costs=costs), costs)
    loose = simulate(auto(4, 12, memory_limit=12, costs=costs), costs)
    assert loose.bubble < tight.bubble


def rules():
    problem = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.booleans())
    return problem.flatmap(
        lambda p: st.tuples(
            st.just(p),
            st.integers(p[2], p[1] * p[2] + 1),
            st.integers(1, p[1]),
            st.integers(0, 15),
            st.booleans(),
            st.booleans(),
            st.randoms(use_true_random=False),
        )
    )


@settings(deadline=None, max_examples=300, print_blob=True)
@given(rules())
def test_no_rule_makes_the_list_scheduler_stop_or_break_the_limit(case):
    (P, M, V, zigzag), limit, in_flight, patience, pause, make_room, random = case
    stages = (zigzag_stages if zigzag else loop_stages)(P, V)
    keys = [[random.randrange(50) for _ in range(M)] for _ in range(2 * P * V)]
    problem = Problem(stages, M, F=10, I=12, W=7, hop=3)
    found = ListScheduler(problem, Rule(keys, limit, in_flight, patience, pause, make_room)).run()
    orders = [
        [Action("FIW"[work // (P * V)], row.index(work % (P * V)), m) for work, m in order]
        for row, order in zip(stages, found.orders, strict=True)
    ]
    schedule = Schedule.from_orders(orders, M, stages)
    result = simulate(schedule, Costs(F=10, I=12, W=7, hop=3))
    assert max(result.peak_until_W) <= limit
    # Whoever follows the orders without pausing is no later than the list scheduler itself.
    assert result.makespan <= found.makespan
    assert found.makespan >= least_makespan(problem, limit)
