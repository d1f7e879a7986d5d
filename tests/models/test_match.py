"""Names of a file find their parameters under whatever prefix and counters the process gave them."""

import pytest

from mxtrain.models.match import match, ranked

STRUCTURAL = ["features.0.weight", "features.1.gamma", "features.1.running_mean", "output.weight"]
FULL = ["net3_conv7_weight", "net3_batchnorm2_gamma", "net3_batchnorm2_running_mean", "net3_dense1_weight"]


def always(name, saved):
    return True


@pytest.mark.parametrize("saved", [
    STRUCTURAL,  # save_parameters
    FULL,  # the old save_params, in the same process
    ["arg:" + FULL[0], "arg:" + FULL[1], "aux:" + FULL[2], "arg:" + FULL[3]],  # export, in the same process
    [name.replace("net3_", "other_") for name in FULL],  # another prefix
    [name.replace("net3_", "") for name in FULL],  # no prefix
    ["model.backbone." + name for name in STRUCTURAL],  # saved as a part of something
    # Another process: other counters of networks and layers.
    ["net0_conv0_weight", "net0_batchnorm0_gamma", "net0_batchnorm0_running_mean", "net0_dense0_weight"],
    ["x_conv0_weight", "x_batchnorm0_gamma", "x_batchnorm0_running_mean", "x_dense0_weight"],
])
def test_the_names_of_the_same_network_match(saved):
    assert match(STRUCTURAL, FULL, "net3_", saved, always) == dict(zip(STRUCTURAL, saved))


def test_the_rule_with_the_most_fitting_shapes_wins():
    # By structure only the head matches, and it does not fit; by full name two others do.
    saved = ["output.weight", FULL[0], FULL[1]]
    found = match(STRUCTURAL, FULL, "net3_", saved, lambda name, key: key != "output.weight")
    assert found == dict(zip(STRUCTURAL, FULL[:2]))


def test_of_equally_good_rules_the_stricter_one_wins():
    # dense5 is meant for dense5, not for the first of the two as ranks would have it.
    found = match(["0.weight", "1.weight"], ["dense4_weight", "dense5_weight"], "", ["dense5_weight"], always)
    assert found == {"1.weight": "dense5_weight"}


def test_parameters_without_a_partner_are_left_out():
    assert match(STRUCTURAL, FULL, "net3_", ["features.0.weight", "head.weight"], always) == {
        "features.0.weight": "features.0.weight"}
    assert match(STRUCTURAL, FULL, "net3_", ["a", "b"], always) == {}
    assert match([], [], "", [], always) == {}


def test_ranked_counts_within_the_same_place_and_by_number():
    names = ["stage2_conv10_weight", "stage2_conv9_weight", "stage10_conv3_weight", "dense4_bias"]
    assert ranked(names) == [
        "stage0_conv1_weight", "stage0_conv0_weight", "stage1_conv0_weight", "dense0_bias"]
