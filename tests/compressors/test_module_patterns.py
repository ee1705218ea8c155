import pytest

from compressors.module_patterns import without_ignored
from modelpress.errors import InvalidRecipe

NAMES = ("encoder.0.query", "encoder.0.key", "encoder.1.query", "classifier")


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        ((), NAMES),
        (("classifier",), NAMES[:3]),
        ((r"re:.*query$",), ("encoder.0.key", "classifier")),
        ((r"re:encoder\.0",), ("encoder.1.query", "classifier")),
        (("classifier", "re:encoder"), ()),
    ],
)
def test_what_no_pattern_matches_is_left_in_order(patterns: tuple[str, ...], left: tuple[str, ...]) -> None:
    assert without_ignored(NAMES, patterns) == left


@pytest.mark.parametrize("pattern", ["query", "re:query", "encoder.0"])
def test_a_pattern_that_matches_nothing_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(InvalidRecipe, match=f"'{pattern}' matches no linear layer") as error:
        without_ignored(NAMES, ("classifier", pattern))
    assert error.value.field == "ignore[1]"


def test_a_broken_regular_expression_is_refused() -> None:
    with pytest.raises(InvalidRecipe, match="not a regular expression"):
        without_ignored(NAMES, ("re:(",))
