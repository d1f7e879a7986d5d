"""MXNet's parameter files, read without MXNet: the same arrays, and an error for anything damaged."""

import struct

import mxnet as mx
import numpy as np
import pytest

from mxtrain.models.params_file import FormatError, parse


def saved(tmp_path, arrays):
    path = str(tmp_path / "a.params")
    mx.nd.save(path, arrays)
    with open(path, "rb") as file:
        return file.read()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint8", "int8", "int32", "int64"])
def test_arrays_of_every_type_are_what_mxnet_saved(tmp_path, dtype):
    arrays = {"arg:a_weight": mx.nd.arange(24, dtype=dtype).reshape((2, 3, 4)),
              "ü": mx.nd.array([7], dtype=dtype)}
    read = parse(saved(tmp_path, arrays))
    assert list(read) == list(arrays)
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array.asnumpy())


def test_arrays_of_numpy_semantics_may_have_no_axes(tmp_path):
    with mx.util.np_shape(True), mx.util.np_array(True):
        path = str(tmp_path / "a.params")
        mx.npx.save(path, {"scalar": mx.np.array(3.0), "empty": mx.np.zeros((0, 2))})
    read = parse(open(path, "rb").read())
    assert read["scalar"].shape == () and read["scalar"] == 3
    assert read["empty"].shape == (0, 2)


def test_the_oldest_format():
    array = struct.pack("<IIIiii", 2, 2, 1, 1, 0, 0) + np.float32([5, 6]).tobytes()
    content = struct.pack("<QQQ", 0x112, 0, 1) + array + struct.pack("<QQ", 1, 1) + b"w"
    np.testing.assert_array_equal(parse(content)["w"], np.float32([[5], [6]]))


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b"\x93NUMPY\x01\x00", bytes(100)])
def test_other_files_are_refused(content):
    with pytest.raises(FormatError):
        parse(content)


def test_arrays_without_names_and_sparse_ones_are_refused(tmp_path):
    with pytest.raises(FormatError, match="1 arrays, 0 names"):
        parse(saved(tmp_path, [mx.nd.ones(3)]))
    with pytest.raises(FormatError, match="sparse"):
        parse(saved(tmp_path, {"a": mx.nd.ones((2, 2)).tostype("csr")}))


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path):
    content = saved(tmp_path, {"a": mx.nd.ones((2, 3)), "b": mx.nd.ones(1)})
    for length in range(len(content)):
        with pytest.raises(FormatError):
            parse(content[:length])
    with pytest.raises(FormatError):
        parse(content + b"\0")


def test_damaged_bytes_give_an_error_or_arrays_no_larger_than_the_file(tmp_path):
    # MXNet's reader takes a damaged size for the truth, and asks for that much memory.
    content = saved(tmp_path, {"a": mx.nd.ones((2, 3)), "b": mx.nd.ones(1)})
    for i in range(len(content)):
        for value in (0, 1, 127, 255):
            damaged = content[:i] + bytes([value]) + content[i + 1:]
            try:
                assert sum(array.nbytes for array in parse(damaged).values()) <= len(content)
            except FormatError:
                pass
