"""Halving and population-based training, by scores given by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.strategies.population import combinations
from jaxrl.strategies.search import PBT, Copy, Halving, Verdict, make_search, parse_search, rank

NAN = math.nan
LR = jaxrl.log_uniform(1e-4, 1e-1)


def pbt(**settings: object) -> PBT:
    return PBT(**{"interval": 100, **settings}).within({"agent.lr": LR}, 0)  # type: ignore[arg-type]


def values(numbers: object) -> dict[int, dict[str, float]]:
    return {number: {"agent.lr": 1e-2} for number in numbers}  # type: ignore[attr-defined]


def test_what_is_not_finite_comes_last_and_equals_go_by_their_number() -> None:
    assert rank({3: 1.0, 1: NAN, 0: 5.0, 2: 1.0, 4: math.inf, 5: -math.inf}) == [0, 2, 3, 1, 4, 5]


@pytest.mark.parametrize(
    ("factor", "members", "gates"),
    [(3, 27, [34, 100, 300]), (3, 9, [100, 300]), (3, 8, [300]), (2, 2, [450]), (3, 2, [300]), (10, 100, [9, 90])],
)
def test_rungs_as_early_as_there_are_members_for(factor: int, members: int, gates: list[int]) -> None:
    """900 steps, evaluated after each: the last rung at 900 / f, each of the others a part f of the next."""
    assert Halving(factor, first=0).gates(members, 900, 1) == gates


@pytest.mark.parametrize(
    ("factor", "members", "gates"),
    [(2, 16, [225, 450]), (3, 16, [225, 675]), (3, 8, [225]), (4, 16, [225]), (2, 1024, [225, 450]), (3, 2, [225])],
)
def test_rungs_begin_where_learning_has_begun_and_half_of_the_steps_are_made_at_most(
    factor: int, members: int, gates: list[int]
) -> None:
    search = Halving(factor)
    assert search.gates(members, 900, 1) == gates
    there, made, before = members, 0.0, 0
    for gate in [*gates, 900]:
        made, before = made + there * (gate - before), gate
        there = math.ceil(there / factor)
    assert made / (900 * members) <= 0.5 + 1 / members  # members are rounded up


def test_rungs_are_at_evaluations_before_the_end() -> None:
    assert Halving(3, first=0).gates(27, 900, 50) == [50, 100, 300]
    assert Halving(3).gates(27, 900, 400) == [400, 800]
    assert Halving(3).gates(27, 900, 900) == []
    assert Halving(3, first=0.07).gates(27, 1_000, 10) == [70, 210, 630]  # in floating point the first is above


def test_the_best_share_goes_on_rounded_up() -> None:
    scores = {0: 1.0, 1: 9.0, 2: NAN, 3: 7.0, 4: 7.0, 5: 2.0, 6: 3.0}
    assert Halving(3).decide(0, scores, {}) == Verdict(ended=(0, 2, 5, 6))
    assert Halving(2).decide(0, {4: 1.0, 7: 2.0}, {}) == Verdict(ended=(4,))


def test_the_worst_take_over_from_the_best() -> None:
    scores = {number: float(number) for number in range(10)}
    copies = pbt(share=0.2).decide(0, scores, values(range(10))).copies
    assert [copy.member for copy in copies] == [0, 1]
    assert {copy.parent for copy in copies} <= {8, 9}
    # 100 * 0.29 is 28.999999999999996.
    assert len(pbt(share=0.29).decide(0, {i: float(i) for i in range(100)}, values(range(100))).copies) == 29
    several = {pbt(share=0.2).decide(gate, scores, values(range(10))).copies[0].parent for gate in range(20)}
    assert several == {8, 9}


def test_one_that_is_not_finite_never_wins_and_equals_are_left_alone() -> None:
    assert [c.member for c in pbt(share=0.5).decide(0, {0: NAN, 1: 1.0}, values(range(2))).copies] == [0]
    assert pbt(share=0.5).decide(0, {0: NAN, 1: NAN}, values(range(2))) == Verdict()
    assert pbt(share=0.5).decide(0, {0: 3.0, 1: 3.0, 2: 3.0}, values(range(3))) == Verdict()
    assert pbt().decide(0, {5: 3.0}, values([5])) == Verdict()
    for gate in range(20):
        scores = {0: NAN, 1: 2.0, 2: math.inf, 3: 1.0}
        for copy in pbt(select="tournament").decide(gate, scores, values(range(4))).copies:
            assert copy.parent in (1, 3)


def test_in_a_tournament_nobody_meets_themselves() -> None:
    """Of two, the worse meets the better at every gate; of three, the middle one meets the best at every other."""
    tournament = pbt(select="tournament")
    for gate in range(20):
        (copy,) = tournament.decide(gate, {0: 1.0, 1: 2.0}, values(range(2))).copies
        assert (copy.member, copy.parent) == (0, 1)
    of_three = [tournament.decide(gate, {0: 1.0, 1: 2.0, 2: 3.0}, values(range(3))).copies for gate in range(200)]
    assert 80 < sum(any(copy.member == 1 for copy in copies) for copies in of_three) < 120


def test_in_a_tournament_no_parent_is_replaced_itself() -> None:
    scores = {number: float(number % 7) for number in range(12)}
    replaced = 0
    for gate in range(30):
        copies = pbt(select="tournament").decide(gate, scores, values(range(12))).copies
        members, parents = {copy.member for copy in copies}, {copy.parent for copy in copies}
        assert not members & parents
        assert all(scores[copy.parent] > scores[copy.member] for copy in copies)
        replaced += len(members)
    assert 60 < replaced < 200  # of 360; nearly half meet someone better


def test_settings_are_multiplied_or_drawn_anew_and_stay_in_their_range() -> None:
    scores = {0: 0.0, 1: 1.0}
    never, always = pbt(share=0.5, resample=0.0), pbt(share=0.5, resample=1.0)
    got = [never.decide(gate, scores, values(range(2))).copies[0].values["agent.lr"] for gate in range(40)]
    assert {round(value, 6) for value in got} == {0.008, 0.0125}
    high = {0: {"agent.lr": 0.09}, 1: {"agent.lr": 0.09}}
    assert {never.decide(gate, scores, high).copies[0].values["agent.lr"] for gate in range(40)} == {0.09 * 0.8, 1e-1}
    drawn = [always.decide(gate, scores, values(range(2))).copies[0].values["agent.lr"] for gate in range(200)]
    assert all(1e-4 <= value <= 1e-1 for value in drawn)
    assert 60 < sum(value < 10**-2.5 for value in drawn) < 140  # half of them, in the logarithm


def test_in_a_list_a_setting_moves_to_its_neighbour() -> None:
    search = PBT(100, share=0.5, resample=0.0).within({"agent.lr": [1e-3, 1e-2, 1e-1]}, 0)
    scores = {0: 0.0, 1: 1.0}
    middle = [search.decide(gate, scores, values(range(2))).copies[0].values["agent.lr"] for gate in range(30)]
    assert set(middle) == {1e-3, 1e-1}
    edge = {n: {"agent.lr": 1e-1} for n in range(2)}
    assert {search.decide(g, scores, edge).copies[0].values["agent.lr"] for g in range(30)} == {1e-2, 1e-1}


def test_a_factor_of_one_leaves_a_value_of_a_list_where_it_is() -> None:
    search = PBT(100, share=0.5, resample=0.0, factors=(1.0,)).within({"agent.lr": [1e-3, 1e-2, 1e-1]}, 0)
    (copy,) = search.decide(100, {0: 1.0, 1: 0.0}, values(range(2))).copies
    assert copy.values == {"agent.lr": 1e-2}


def test_each_setting_and_each_member_has_its_own_randomness() -> None:
    search = PBT(100, share=0.5).within({"agent.lr": LR, "agent.ent_coef": LR}, 0)
    both = {n: {"agent.lr": 1e-2, "agent.ent_coef": 1e-2} for n in range(40)}
    copies = search.decide(0, {n: float(n) for n in range(40)}, both).copies
    assert len({copy.values["agent.lr"] == copy.values["agent.ent_coef"] for copy in copies}) == 2
    assert len({copy.values["agent.lr"] for copy in copies}) > 2


def test_a_verdict_depends_on_scores_seed_and_gate_alone() -> None:
    scores = {number: float(number) for number in range(10)}
    decide = lambda gate, seed: PBT(1).within({"agent.lr": LR}, seed).decide(gate, scores, values(range(10)))
    assert decide(3, 5) == decide(3, 5)
    assert decide(3, 5) != decide(4, 5)
    assert decide(3, 5) != decide(3, 6)
    assert isinstance(decide(3, 5).copies[0], Copy)


def test_parents_are_not_drawn_as_the_first_settings_of_members_were() -> None:
    """The parent of member 0 at a gate and the setting of the member of that number are one of two each."""
    sweep = {"agent.lr": [1e-3, 1e-2], "agent.ent_coef": LR}
    first = combinations(sweep, 1, 40, 0)
    search, scores = PBT(100, share=0.5).within(sweep, 0), {0: 0.0, 1: 1.0, 2: 3.0, 3: 2.0}
    parents = [search.decide(gate, scores, dict(enumerate(first[:4]))).copies[0].parent for gate in range(40)]
    assert 10 < sum((parent == 3) == (one["agent.lr"] == 1e-2) for parent, one in zip(parents, first, strict=True)) < 30


def test_words_of_a_command_line() -> None:
    assert parse_search("pbt", ["2000"]) == {"interval": 2000}
    told = ["interval=2e3", "share=0.25", "select=tournament", "factors=0.5,2"]
    assert parse_search("pbt", told) == {"interval": 2000, "share": 0.25, "select": "tournament", "factors": (0.5, 2.0)}
    assert parse_search("halving", ["4"]) == {"factor": 4}
    assert parse_search("halving", ["4", "first=0.1"]) == {"factor": 4, "first": 0.1}
    again = make_search({"pbt": PBT(2000).settings()})
    assert again == PBT(2000)
    assert make_search({"pbt": None}) is None


SWEPT = {"agent.lr": LR}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: parse_search("pbt", ["interva=3"]), "unknown setting pbt.interva; did you mean interval?"),
        (lambda: parse_search("pbt", ["share=0.2"]), "pbt needs its interval"),
        (lambda: parse_search("pbt", ["many"]), "pbt.interval is 'many'; expected a whole number"),
        (lambda: parse_search("pbt", ["2.5"]), "pbt.interval is '2.5'; expected a whole number"),
        (lambda: parse_search("pbt", ["5", "factors=a"]), "pbt.factors is 'a'; expected numbers"),
        (lambda: parse_search("pbt", ["5", "sweep=a"]), "unknown setting pbt.sweep"),
        (lambda: parse_search("halving", ["x"]), "halving.factor is 'x'"),
        (lambda: make_search({"pbt": 5, "halving": 3}), "two searches; choose one"),
        (lambda: Halving(1).within(SWEPT, 0), "halving: factor is 1"),
        (lambda: Halving(3, first=2.0).within(SWEPT, 0), "halving: first is 2"),
        (
            lambda: Halving(3, first=1.0).within(SWEPT, 0),
            "halving: first is 1, the end, where nothing is left to save; expected a share",
        ),
        (lambda: PBT(0).within(SWEPT, 0), "pbt: interval is 0"),
        (lambda: PBT(1, share=0.6).within(SWEPT, 0), "pbt: share is 0.6"),
        (lambda: PBT(1, resample=2.0).within(SWEPT, 0), "pbt: resample is 2"),
        (lambda: PBT(1, select="best").within(SWEPT, 0), "pbt: select is 'best'"),  # type: ignore[arg-type]
        (lambda: PBT(1, factors=()).within(SWEPT, 0), "pbt: factors are ()"),
        (lambda: PBT(1, factors=(0.0,)).within(SWEPT, 0), "pbt: factors are (0.0,)"),
        (lambda: PBT(1).within({}, 0), "pbt changes swept settings, and none is"),
        (lambda: PBT(1).within({"buffer.alpha": [0.1, 0.2]}, 0), "pbt cannot change buffer.alpha on the way"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], Any], told: str) -> None:
    with pytest.raises(SettingsError) as raised:
        make()
    assert told in str(raised.value)
