import subprocess
import sys

import pytest
from mxtrain.data.settings import DataConfig
from mxtrain.errors import UserError


@pytest.mark.parametrize(
    "settings, flag",
    [
        (dict(data=""), "--data"),
        (dict(val=""), "--val"),
        (dict(val_split=1.0), "--val-split 1.0"),
        (dict(val_split=-0.1), "--val-split -0.1"),
        (dict(val_split=float("nan")), "--val-split nan"),
        (dict(val="x", val_split=0.1), "--val x"),
        (dict(image_size=0), "--image-size 0"),
        (dict(resize=-1), "--resize -1"),
        (dict(image_size=224, resize=200), "--resize 200"),
        (dict(augment="rotate"), "none, flip, shift, shift-flip, crop"),
        (dict(workers=-1), "--workers -1"),
        (dict(last_batch="rollover"), "keep, drop"),
    ],
)
def test_bad_settings_name_their_flag(settings, flag):
    with pytest.raises(UserError) as error:
        DataConfig(**settings)
    assert flag in str(error.value) and "\n" not in str(error.value)


def test_settings_load_without_mxnet():
    code = "import mxtrain.data.settings, sys; sys.exit(any(m in sys.modules for m in ('mxnet', 'cv2')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
