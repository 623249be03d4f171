"""What is said of arguments by the names that users know."""

import pytest

from manymesh._api._names import SHOWN, differences

pytestmark = pytest.mark.once

BATCH = {"args[0]": "float32[8]", "args[1]": "float32[8]"}


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ([], ""),
        ([BATCH], ""),
        ([{**BATCH, "args[1]": "int32[8]"}], "args[1] is float32[8] and was int32[8]"),
        ([{}, {**BATCH, "args[0]": "float32[4]"}], "args[0] is float32[8] and was float32[4]"),
        ([{"args[0]": "float32[8]"}], "args[1] is float32[8] and was not there"),
        ([{**BATCH, "kwargs['t']": "int32[]"}], "kwargs['t'] is not there and was int32[]"),
    ],
)
def test_how_arguments_differ_from_those_before(known, words):
    """From those that are the most alike."""
    assert differences(BATCH, known) == words


def test_many_that_differ_are_counted():
    types = {f"args[{k}]": "float32[]" for k in range(SHOWN + 4)}
    assert differences(types, [dict.fromkeys(types, "int32[]")]).endswith(
        "[2] is float32[] and was int32[], and 4 more differ"
    )
