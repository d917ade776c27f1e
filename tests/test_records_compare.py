"""What a comparison shows is told from resolved settings."""

import pytest
from test_records_store import cell_record

from kit.errors import KitError
from kit.records.compare import compare, require_comparable


def arm(name, **resolved):
    return [cell_record(arm=name, resolved={"engine": "llamacpp", "model_stamp": "s", "layout": "cpu", **resolved})]


def test_one_difference_is_isolated():
    found = compare({"off": arm("off", draft_width=0), "on": arm("on", draft_width=1)})
    assert found.isolates == "draft_width"
    assert "isolates" in found.sentence()


def test_several_differences_are_a_comparison_of_deployments_and_all_are_listed():
    found = compare({"a": arm("a", draft_width=0, slots=8), "b": arm("b", draft_width=1, slots=4)})
    assert found.isolates is None
    assert "Deployments are compared" in found.sentence()
    assert {d.field for d in found.differences} == {"draft_width", "slots"}


def test_a_setting_only_one_arm_reports_is_a_difference():
    assert compare({"a": arm("a"), "b": arm("b", draft_width=1)}).isolates == "draft_width"


@pytest.mark.parametrize("field", ["model_stamp", "layout", "engine", "engine_build"])
def test_arms_that_do_not_belong_on_one_chart_are_refused_naming_the_field(field):
    with pytest.raises(KitError, match=field):
        require_comparable({"a": arm("a", **{field: "x"}), "b": arm("b", **{field: "y"})})


def test_another_workload_is_refused():
    other = [cell_record(arm="b", workload_hash="z", resolved=arm("b")[0].resolved)]
    with pytest.raises(KitError, match="workload_hash"):
        require_comparable({"a": arm("a"), "b": other})


def test_the_pair_a_a_has_no_difference():
    assert "A/A" in compare({"a": arm("a"), "a-again": arm("a-again")}).sentence()


def test_a_setting_that_varies_within_an_arm_is_shown_with_all_its_values():
    mixed = arm("a", pool=10) + arm("a", pool=20)
    [difference] = compare({"a": mixed, "b": arm("b", pool=10)}).differences
    assert difference.values["a"] == "10 | 20"


def test_what_attached_servers_do_not_tell_is_not_taken_for_equal():
    found = compare({"a": arm("a", engine="openai"), "b": arm("b", engine="openai", draft_width=1)})
    assert found.isolates is None
    assert "do not tell may differ" in found.sentence()
    assert "A/A" not in compare({"a": arm("a", engine="openai"), "b": arm("b", engine="openai")}).sentence()
