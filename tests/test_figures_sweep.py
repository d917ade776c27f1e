"""What figures may claim: effects are told from noise, arms from deployments, and gaps from zeros."""

from __future__ import annotations

import itertools

import figures_data as data
import pytest

from kit.errors import KitError
from kit.figures.style import looks, spread
from kit.figures.sweep import Sweep, finding, from_cells


def flat(values: dict[str, dict[float, list[float]]], twin: tuple[str, str] | None = None) -> Sweep:
    return Sweep(
        arms={arm: arm for arm in values if not arm.endswith("-again")},
        loads=sorted({load for by_load in values.values() for load in by_load}),
        values={
            "output_tps": {
                arm: {load: dict(enumerate(known)) for load, known in by_load.items()}
                for arm, by_load in values.items()
            }
        },
        baseline="baseline",
        twin=twin,
    )


def test_a_clear_effect_is_told_and_a_small_one_is_not() -> None:
    sweep = flat(
        {
            "baseline": {1: [100, 101, 99], 8: [400, 404, 396]},
            "mtp": {1: [130, 132, 129], 8: [401, 396, 404]},
        }
    )
    assert sweep.effect("output_tps", "mtp", 1).verdict == "above"
    assert sweep.effect("output_tps", "mtp", 8).verdict == "noise"
    headline = finding(sweep, "output_tps")
    assert "1.30×" in headline and "c\u00a0=\u00a01" in headline
    assert "no difference larger than the noise at c\u00a0=\u00a08" in headline


def test_no_effect_at_all_is_said_plainly() -> None:
    sweep = flat({"baseline": {1: [100, 104, 97]}, "mtp": {1: [101, 98, 103]}})
    assert finding(sweep, "output_tps") == "No difference in output throughput larger than the noise at any c measured"


def test_points_with_too_few_repeats_are_undecided_and_never_called_noise() -> None:
    sweep = flat(
        {
            "baseline": {1: [100, 104, 97], 4: [200, 201, 202], 8: [400, 401, 402]},
            "mtp": {1: [101, 98, 103], 4: [150, 260], 8: [700]},
        }
    )
    said = finding(sweep, "output_tps")
    assert said == (
        "No difference in output throughput larger than the noise at c\u00a0=\u00a01; "
        "undecided at c\u00a0=\u00a04 and 8 (n = 1 to 2)"
    )
    sweep = flat({"baseline": {1: [100, 101, 99], 8: [400, 401]}, "mtp": {1: [130, 131, 129], 8: [402, 401]}})
    assert finding(sweep, "output_tps").endswith("; undecided at c\u00a0=\u00a08 (n = 2)")


def test_an_effect_inside_the_aa_spread_is_noise_though_its_interval_leaves_out_one() -> None:
    values = {"baseline": {1: [100, 100.1, 99.9]}, "mtp": {1: [102, 102.1, 101.9]}}
    assert flat(values).effect("output_tps", "mtp", 1).verdict == "above"
    values["baseline-again"] = {1: [104, 100, 100]}
    judged = flat(values, twin=("baseline", "baseline-again")).effect("output_tps", "mtp", 1)
    assert judged.verdict == "noise"
    assert judged.noise == pytest.approx(0.0392, abs=1e-3)


@pytest.mark.parametrize("repeats", [1, 2])
def test_with_fewer_than_three_repeats_nothing_is_claimed(repeats: int) -> None:
    sweep = from_cells(data.cells(repeats, again=False))
    assert all(e.verdict == "unknown" and e.ratio.low is None for e in sweep.effects("output_tps"))
    assert f"n = {repeats}, so the noise is unknown" in finding(sweep, "output_tps")
    assert "no interval" in sweep.caption("output_tps")


def test_ratios_are_paired_by_repeat() -> None:
    # The machine drifts by half between repeats, and both arms with it: the ratio does not.
    sweep = flat({"baseline": {1: [100, 150, 200]}, "mtp": {1: [110, 165, 220]}})
    ratio = sweep.effect("output_tps", "mtp", 1).ratio
    assert ratio.mean == pytest.approx(1.1)
    assert ratio.high - ratio.low < 1e-9


def test_cells_that_failed_are_left_out_and_named() -> None:
    cells = [
        *data.cells(),
        data.cell("mtp-1", 2, 7, status="invalid", reason="client-bound", metrics={"output_tps": 1.0}),
    ]
    sweep = from_cells(cells)
    assert 7 not in sweep.repeats("output_tps", "mtp-1", 2)
    assert sweep.notes == ["Left out: 1 cell (invalid: client-bound): mtp-1 at c2 repeat 8."]


def test_arms_of_another_layout_share_no_chart() -> None:
    other = [
        data.cell("mtp-1", 1, r, resolved={"layout": "PP2", "engine_build": "b1", "model_stamp": "m1"})
        for r in (0, 1, 2)
    ]
    with pytest.raises(KitError, match="layout"):
        from_cells([*data.cells(arms=("baseline",)), *other])


def test_one_difference_isolates_and_more_compare_deployments() -> None:
    assert "isolates" in from_cells(data.cells()).comparison
    changed = [
        c.model_copy(update={"resolved": {**c.resolved, "slots": 9 if c.cell.arm == "mtp-1" else 8}})
        for c in data.cells()
    ]
    sentence = from_cells(changed).comparison
    assert "Deployments are compared" in sentence and "slots" in sentence and "draft_width" in sentence


def test_the_aa_twin_is_no_arm_of_its_own() -> None:
    sweep = from_cells(data.cells())
    assert list(sweep.arms) == ["baseline", "mtp-1", "mtp-2"]
    assert sweep.twin == ("baseline", "baseline-again")
    assert sweep.noise("output_tps", 8) > 0


def test_labels_of_single_cells_say_where_they_hold() -> None:
    cells = data.cells()
    cells[0] = cells[0].model_copy(update={"flags": ["client-bound"]})
    assert from_cells(cells).flags == ["client-bound (1 cells: baseline at c1)"]


def test_unknown_arm_and_no_cells_are_explained() -> None:
    with pytest.raises(KitError, match=r"mtp-9.*baseline, mtp-1, mtp-2"):
        from_cells(data.cells(), arms=["baseline", "mtp-9"])
    with pytest.raises(KitError, match="no cells"):
        from_cells([])


def test_repeats_of_two_runs_are_kept_apart() -> None:
    second = [c.model_copy(update={"run_id": "20260102T000000Z"}) for c in data.cells(repeats=2)]
    sweep = from_cells([*data.cells(repeats=2), *second])
    assert sweep.count("output_tps") == (4, 4)
    assert len(sweep.sources) == 2


def test_an_arm_looks_alike_whatever_it_is_drawn_with() -> None:
    assert looks(["baseline", "mtp-1"])["mtp-1"] == looks(["mtp-1", "x", "y"])["mtp-1"]
    assert len({look.color for look in looks(["baseline", "mtp-1", "mtp-2", "x", "y"]).values()}) == 5


def test_labels_are_pushed_apart_and_stay_inside() -> None:
    placed = spread([0.5, 0.51, 0.49, 0.98, 0.99], [0.1] * 5)
    ordered = sorted(placed)
    assert all(b - a >= 0.1 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert max(placed) <= 1.02 - 0.05 + 1e-9
    assert sorted(range(5), key=lambda i: placed[i]) == [2, 0, 1, 3, 4]


def test_a_long_list_of_differences_is_cut_in_a_caption() -> None:
    changed = [
        c.model_copy(update={"resolved": {**c.resolved, **{f"setting_{i}": c.cell.arm for i in range(9)}}})
        for c in data.cells()
    ]
    sentence = from_cells(changed).comparison
    assert "10 settings differ" in sentence and "…" in sentence and "mtp-2" not in sentence


def test_when_nothing_ended_well_the_reasons_are_grouped() -> None:
    cells = [data.cell("mtp-1", load, 0, status="invalid", reason="no token") for load in (1, 2)]
    with pytest.raises(KitError, match=r"2 cells \(invalid: no token\)"):
        from_cells(cells)
