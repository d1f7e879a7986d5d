import subprocess
import sys

import pytest
from mxtrain.data.settings import DataConfig, operations_and_magnitude
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
        (dict(color_jitter=-0.1), "--color-jitter -0.1"),
        (dict(color_jitter=1.5), "--color-jitter 1.5: must be from 0 to 1"),
        (dict(hue=0.6), "--hue 0.6: must be from 0 to 0.5"),
        (dict(lighting=float("nan")), "--lighting nan"),
        (dict(random_erasing=2), "--random-erasing 2"),
        *((dict(rand_augment=text), f"--rand-augment {text}: must be N,M")
          for text in ("", "2", "2,", "0,9", "2,11", "-2,9", "2,9,1", "two,9", "2.5,9")),
        (dict(workers=-1), "--workers -1"),
        (dict(shuffle_block=8), "--shuffle-block 8: has no effect with --shuffle full"),
        (dict(shuffle="none", shuffle_window=8), "--shuffle-window 8: has no effect with --shuffle none"),
        (dict(last_batch="rollover"), "keep, drop"),
    ],
)
def test_bad_settings_name_their_flag(settings, flag):
    with pytest.raises(UserError) as error:
        DataConfig(**settings)
    assert flag in str(error.value) and "\n" not in str(error.value)


def test_rand_augment_is_two_numbers():
    assert operations_and_magnitude("2,9") == operations_and_magnitude(" 2, 9") == (2, 9)
    assert DataConfig(rand_augment="1,0").rand_augment == "1,0"


def test_settings_load_without_mxnet():
    code = "import mxtrain.data.settings, sys; sys.exit(any(m in sys.modules for m in ('mxnet', 'cv2')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
