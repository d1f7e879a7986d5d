import pytest

from mxtrain.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize("text, expected", [
    ("500MB", 500_000_000), ("1.5GB", 1_500_000_000), ("2GiB", 2 * 2**30), ("1 kB", 1000), (".5gb", 500_000_000),
    ("7B", 7), ("2", None), ("blocks", None), ("0MB", None), ("0.1B", None), ("-1GB", None), ("1.2.3GB", None), ("", None)])
def test_an_amount_needs_a_number_and_a_unit(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("number, expected", [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (9_996_000, "10.0 MB"),
                                              (999_600, "1.00 MB"), (123.4e9, "123 GB"), (5e12, "5.00 TB")])
def test_amounts_have_three_digits(number, expected):
    assert format_bytes(number) == expected
