"""The settings of the network refuse what has no meaning, and need no mxnet."""

import subprocess
import sys

import pytest

from mxtrain import UserError
from mxtrain.models.settings import ModelConfig


@pytest.mark.parametrize("settings, message", [
    (dict(model=" "), "--model is empty"),
    (dict(pretrained=True, init_from="a.params"), "--pretrained and --init-from"),
    (dict(pretrained_root="models"), "--pretrained-root has no effect"),
    (dict(zero_gamma=True, pretrained=True), "--zero-gamma would overwrite"),
    (dict(zero_gamma=True, init_from="a.params"), "--zero-gamma would overwrite"),
    (dict(freeze=["features", "("]), r"--freeze \(: not a regular expression"),
])
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        ModelConfig(**settings)


def test_importing_them_does_not_import_mxnet():
    code = "import sys, mxtrain.models.settings, mxtrain.models.params_file; print('mxnet' in sys.modules)"
    printed = subprocess.check_output([sys.executable, "-c", code], universal_newlines=True)
    assert printed.strip() == "False"
