"""Properties of plain data as JSON: what is written is read back as it was."""

import json

import pytest

from shardcore.checkpoint import plain

hypothesis = pytest.importorskip("hypothesis", reason="property tests need hypothesis")
st = pytest.importorskip("hypothesis.strategies", reason="property tests need hypothesis")

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(["$tuple", "$dict", "crc32c"])
)
KEYS = (
    st.text(max_size=3)
    | st.integers()
    | st.booleans()
    | st.tuples(st.integers())
    | st.just("$bytes")
)
VALUES = st.recursive(
    LEAVES,
    lambda values: (
        st.lists(values, max_size=3)
        | st.lists(values, max_size=3).map(tuple)
        | st.dictionaries(KEYS, values, max_size=3)
    ),
    max_leaves=10,
)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(VALUES)
def test_values_come_back(value: object) -> None:
    found = plain.from_json(
        json.loads(json.dumps(plain.to_json(value, "value"), allow_nan=False)), "file"
    )
    assert found == value
    assert repr(found) == repr(value)  # 1 is True, and (1,) is no list
