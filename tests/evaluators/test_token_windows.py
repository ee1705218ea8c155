"""Windows: the drawing of LanguageEvaluation holds, and no token is predicted twice whatever window and stride."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from evaluators.token_windows import (
    Window,
    batches,
    check_vocabulary,
    check_window,
    common_tokens,
    cut_windows,
    padded,
    text_tokens,
)
from modelpress.errors import InvalidDataset, InvalidModel, InvalidRequest
from modelpress.evaluations import LanguageEvaluation

SIZES = list(product(range(41), (8, 9, 16), (1, 3, 8)))


def drawn(windows: tuple[Window, ...]) -> list[str]:
    return [" " * w.start + "-" * (w.first - w.start) + "x" * w.predicted for w in windows]


def test_the_drawings_in_the_documentation_are_the_windows():
    lines = [line.removeprefix("    ") for line in LanguageEvaluation.__doc__.splitlines() if set(line) <= set(" -x")]
    drawings = [line.removeprefix("    ") for line in lines if line.strip()]
    assert drawings == drawn(cut_windows(16, window=8, stride=4)) + drawn(cut_windows(16, window=8, stride=8))


@pytest.mark.parametrize(("tokens", "window", "stride"), SIZES)
def test_tokens_are_predicted_at_most_once_and_all_that_something_precedes(tokens, window, stride):
    windows = cut_windows(tokens, window=window, stride=stride)
    predicted = [token for w in windows for token in range(w.first, w.stop)]
    starts = range(0, tokens, stride) if stride == window else [0]
    assert predicted == [token for token in range(tokens) if token not in starts]
    assert all(w.start < w.first < w.stop <= w.start + window for w in windows)


def test_a_last_window_of_one_token_predicts_nothing_and_is_left_out():
    assert cut_windows(17, window=8, stride=8) == (Window(0, 8, 1), Window(8, 16, 9))
    assert cut_windows(18, window=8, stride=8)[-1] == Window(16, 18, 17)


def test_sixteen_windows_of_512_without_overlap_predict_8176_tokens():
    windows = cut_windows(8192, window=512, stride=512)
    assert (len(windows), sum(w.predicted for w in windows)) == (16, 8176)


class WordLengths:
    """A tokenizer that begins every text with token 99 and has one token per word: its length."""

    def __call__(self, texts, verbose):
        return {"input_ids": [[99, *map(len, text.split())] for text in texts]}


def test_texts_follow_one_another_each_with_its_own_special_tokens():
    assert text_tokens(["a bb", "", "ccc"], WordLengths()) == [99, 1, 2, 99, 99, 3]


def test_one_token_is_too_few():
    with pytest.raises(InvalidDataset, match="give 1 tokens: at least 2"):
        text_tokens([""], WordLengths())


def test_rows_are_padded_on_the_right_and_masked():
    ids_BT, mask_BT = padded([[5, 6, 7], [8]])
    assert ids_BT.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert mask_BT.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert ids_BT.dtype == mask_BT.dtype == torch.int64


def test_batches_keep_order_and_leave_nothing_out():
    assert list(batches("abcde", 2)) == ["ab", "cd", "e"]


@pytest.mark.parametrize(
    ("one", "other", "count"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1), ([1], [1], 1)]
)
def test_common_tokens_end_at_the_first_difference(one, other, count):
    assert common_tokens(one, other) == count


def test_what_the_model_cannot_take_is_refused():
    check_window(64, {"max_position_embeddings": 64})
    check_vocabulary([3, 9], {"vocab_size": 10})
    with pytest.raises(InvalidRequest, match="window is 65, but the model takes at most 64") as fault:
        check_window(65, {"max_position_embeddings": 64})
    assert fault.value.field == "evaluation.window"
    with pytest.raises(InvalidModel, match="token id 10, and the model's vocabulary has 10"):
        check_vocabulary([3, 10], {"vocab_size": 10})
