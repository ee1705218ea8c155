"""Standings: a step adds a loss, a look keeps the best, JSON keeps everything."""

from __future__ import annotations

import json

from compressors.standing import Standing

START = Standing.at_start({"kl": 0.5, "flips": 3.0})


def test_losses_become_points_of_their_mean() -> None:
    standing = START
    for loss in (1.0, 3.0, 5.0):
        standing = standing.after_step(loss, points_every=2)

    assert [(point.step, point.loss) for point in standing.curve] == [(2, 2.0)]
    assert (standing.step, standing.pending, standing.loss) == (3, (5.0,), 5.0)


def test_a_look_right_after_a_point_adds_to_it() -> None:
    standing = START.after_step(1.0, points_every=1).after_look({"kl": 0.7})

    assert [(point.step, point.held_out) for point in standing.curve] == [(1, {"kl": 0.7})]


def test_only_a_lower_kl_is_better() -> None:
    equal = START.after_step(1.0, points_every=1).after_look({"kl": 0.5})
    better = equal.after_step(1.0, points_every=1).after_look({"kl": 0.4})
    worse = better.after_step(1.0, points_every=1).after_look({"kl": 0.6})

    assert (equal.best_step, better.best_step, worse.best_step) == (0, 2, 2)
    assert worse.best == {"kl": 0.4} and worse.before == START.before


def test_a_standing_survives_json() -> None:
    standing = START.after_step(0.1, points_every=1).after_look({"kl": 1 / 3}).after_step(2 / 3, points_every=5)

    assert Standing.from_json(json.loads(json.dumps(standing.to_json()))) == standing
