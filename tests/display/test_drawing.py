"""Charts for notebooks: every sample is drawn once, and a chart is a PNG."""

import mmstream as mm
from mmstream.display.order_drawing import _epoch, draw_chunks, draw_ranks, draw_steps
from mmstream.display.run_drawing import draw_losses, draw_speed

COUNTS = [12, 20, 16]


def small_order():
    return mm.Order.from_counts(
        COUNTS, global_batch_size=4, grid=(2, 2), window=6, interleave=2, chunk=4, seed=3
    )


def test_every_sample_is_one_dot_at_its_place_in_the_list():
    order = small_order()
    epoch = _epoch(COUNTS, order)
    assert sorted(epoch.slot) == list(range(48))
    for dot in range(48):
        refs = order.refs(0, int(epoch.step[dot]))
        row, slot = epoch.row[dot], epoch.slot[dot]
        assert (refs.shard[row], refs.index[row]) == (epoch.shard[slot], epoch.index[slot])
    # A row belongs to one lane: rows 0 and 1 of an even step come from lanes 0 and 2.
    lanes = (epoch.slot // epoch.lane_size).astype(int)
    assert len(set(zip(epoch.step % 2, epoch.row, lanes, strict=True))) == 8


def test_a_chart_is_a_png_that_is_saved_as_it_is(tmp_path):
    lines = [
        {
            "num_steps": n,
            "epoch": n // 3,
            "loss": 1 / (n + 1),
            "samples_per_s": 9,
            "wait_fraction": 0,
        }
        for n in range(6)
    ]
    order = small_order()
    for drawing in (
        draw_chunks(COUNTS, order, moved=(1,)),
        draw_steps(COUNTS, order, steps=(2,)),
        draw_ranks(COUNTS, order, world_sizes=(1, 2)),
        draw_losses({"one run": lines, "another": lines[:2]}, marks={2: "killed"}),
        draw_speed(lines),
    ):
        assert drawing._repr_png_().startswith(b"\x89PNG")
        assert drawing.save(tmp_path / "chart.png").read_bytes() == drawing.png
        assert repr(drawing) == f"<Drawing: {drawing.title}>"
